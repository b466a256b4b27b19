"""`astrai-deploy chat`: a conversation in the terminal, with the engine in this process and no HTTP in between."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console

from astrai_deploy._collector import settle
from astrai_deploy.build import Built, build, plan_with_files, sampling_defaults
from astrai_deploy.progress import shown
from astrai_runtime.errors import AstraiError
from astrai_runtime.event import Delta, Failed, Finished
from astrai_runtime.request import Limits, Message, SamplingParams, Turn

if TYPE_CHECKING:
    from astrai_deploy.compose import Composed

HELP = "/exit leaves, /reset forgets the conversation, Ctrl-C cancels a reply"


def chat(composed: Composed) -> int:
    """Loads the model and talks until `/exit` or the end of input. Returns the exit code."""
    console = Console(stderr=True)
    plan = plan_with_files(composed, console)
    if plan.problem is not None:
        console.print(str(plan.problem), style="red", highlight=False)
        return 3
    with shown(console) as progress:
        built = build(plan, progress)
    built.engine.start()
    settle()
    console.print(f"[bold]{built.engine.info.name}[/] is loaded. {HELP}", highlight=False)
    try:
        converse(built, sampling_defaults(composed.deployment), Console(), interactive=sys.stdin.isatty())
    finally:
        built.engine.shutdown()
    return 0


def converse(built: Built, sampling: SamplingParams, console: Console, *, interactive: bool) -> None:
    """Reads turns from standard input and streams the replies until there are no more turns."""
    history: list[Message] = []
    while True:
        try:
            text = input("you> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if text in {"/exit", "/quit"}:
            return
        if text == "/reset":
            history.clear()
            continue
        if text.startswith("/"):
            console.print(HELP, highlight=False)
            continue
        if text:
            asked = Message("user", text)
            reply = answer(built, sampling, (*history, asked), console)
            if reply is not None:
                history += [asked, Message("assistant", reply)]


def answer(built: Built, sampling: SamplingParams, messages: tuple[Message, ...], console: Console) -> str | None:
    """Streams one reply to the console and returns it; a cancelled one as far as it came, a refused one as None."""
    said: list[str] = []
    try:
        prompt = built.agent.prepare(Turn(sampling=sampling, limits=Limits(), messages=messages, stream=True))
        stream = built.engine.submit(prompt)
    except AstraiError as error:
        console.print(error.message, style="red", highlight=False, markup=False)
        return None
    try:
        for event in stream.events():
            match event:
                case Delta(text=text):
                    said.append(text)
                    print(text, end="", flush=True, file=console.file)
                case Failed(error=failure):
                    console.print(f"\n{failure.message}", style="red", highlight=False, markup=False)
                case Finished(reason="length"):
                    console.print("\n(the context is full or the token limit was reached)", style="dim", highlight=False)
                case _:
                    pass
    except KeyboardInterrupt:
        stream.discard()
        console.print("\n(cancelled)", style="dim", highlight=False)
    console.print()
    return "".join(said)
