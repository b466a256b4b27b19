"""`astrai-deploy +recipe=...`: plans, listens, loads, serves, and on a signal drains and stops."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from rich.console import Console

from astrai_deploy._collector import settle
from astrai_deploy._laps import Laps
from astrai_deploy.build import build, plan_with_files, sampling_defaults
from astrai_deploy.plan import Plan
from astrai_deploy.plan_report import print_plan
from astrai_deploy.progress import shown
from astrai_runtime import log, part
from astrai_runtime.errors import AstraiError, BackendRefused

if TYPE_CHECKING:
    from astrai_deploy.compose import Composed
    from astrai_deploy.schema import Deployment
    from astrai_runtime.generate import TextInterface
    from astrai_runtime.server.serve import Server
    from astrai_runtime.server.state import ServerState

OK, DOES_NOT_FIT = 0, 3


def serve(composed: Composed, laps: Laps | None = None) -> int:
    """Runs the service until a signal ends it. Returns the exit code.

    It listens before the model is loaded (`/health` answers, `/ready` says why not yet), so that whoever waits for it
    can see it coming. SIGTERM or SIGINT: no new requests, running ones get `server.drain_s` seconds, exit 0; a second
    one stops at once (exit 143 or 130). `laps` began with the process; what the start took is logged once it is ready.
    """
    laps = laps or Laps()
    deployment = composed.deployment
    log.configure(deployment.run.log_level, deployment.run.log_format)
    console = Console(stderr=True)
    plan = plan_with_files(composed, console)
    print_plan(plan, composed, console)
    if not plan.fits:
        return DOES_NOT_FIT
    if not plan.machine.probed:
        raise BackendRefused(
            f"machine '{plan.machine.name}' is a description to plan with; serving runs on this machine: use machine=auto"
        )
    signals = Signals()
    laps.lap("plan")
    server, state = listen(deployment)
    laps.lap("listening")
    engine: TextInterface | None = None
    try:
        with shown(console) as progress:
            built = build(plan, progress, laps)
        engine = built.engine
        engine.start()
        settle()
        state.ready(engine, built.agent)
        laps.lap("engine")
        log.get("service").info("ready", **{f"{name}_s": round(took, 3) for name, took in laps.parts.items()})
        announce(plan, server.url, built.load_s, console)
        signals.wait()
        signals.outlast(partial(drain, engine, state, server, deployment.server.drain_s))
    except AstraiError as error:
        state.fail(error.message)
        raise
    finally:
        server.stop(at_once=True)
        server.join(5.0)
        if engine is not None:
            engine.shutdown()
        signals.restore()
    return OK


def listen(deployment: Deployment) -> tuple[Server, ServerState]:
    """The HTTP server on its own thread, answering 503 until its state is ready."""
    from astrai_runtime.server.app import create_app
    from astrai_runtime.server.serve import Server
    from astrai_runtime.server.state import ServerState

    state = ServerState()
    protocols = {name: part.load("protocols", config.kind)(config) for name, config in deployment.protocols.items()}
    stages = [part.load("sampling", name) for name in deployment.sampling.pipeline]
    app = create_app(
        deployment.server,
        protocols,
        {name: config.model_dump()["max_tokens"] for name, config in deployment.protocols.items()},
        state,
        sampling_defaults(deployment),
        [knob for stage in stages for knob in stage.knobs],
        [field for stage in stages for field in stage.fields],
    )
    server = Server(app, deployment.server)
    server.start()
    return server, state


def announce(plan: Plan, url: str, load_s: float, console: Console) -> None:
    """What a newcomer needs next: the address, and one line to try. The address goes to standard output."""
    deployment = plan.deployment
    console.print(f"\n[bold green]Serving[/] {deployment.model.name} on [bold]{url}[/] (loaded in {load_s:.1f} s)")
    routes = {config.kind: config.model_dump()["path"] for config in deployment.protocols.values()}
    if "openai" in routes:
        key = ' -H "Authorization: Bearer $API_KEY"' if deployment.server.keyed else ""
        body = '{"messages": [{"role": "user", "content": "What is a bridge?"}], "temperature": 0}'
        console.print("Try it:", highlight=False)
        command = f"curl -s {url}{routes['openai']} -H 'Content-Type: application/json'{key} -d '{body}'"
        console.print(f"  {command}", highlight=False, markup=False, soft_wrap=True)
    console.print("Ctrl-C stops it (twice: at once).", style="dim", highlight=False)
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def drain(engine: TextInterface, state: ServerState, server: Server, drain_s: float) -> None:
    """Stops taking requests, lets the running ones end within `drain_s` seconds, then closes the socket."""
    logger = log.get("service")
    state.drain()
    finished = engine.drain(drain_s) and state.wait_idle(drain_s)
    logger.info("drained", complete=finished)
    engine.shutdown()  # whoever is left gets an outcome, and with it a last frame
    state.wait_idle(1.0)
    server.stop()
    server.join(5.0)


class Signals:
    """SIGTERM and SIGINT: the first asks the service to stop, the second ends the process at once.

    The kernel may hand a signal to any thread, and then a main thread that waits for a lock sleeps on. So it waits for
    a byte instead, which Python's own handler writes whichever thread was hit.
    """

    def __init__(self) -> None:
        self._received: list[int] = []
        self._serving = False
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGTERM, signal.SIGINT)}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._serving:  # while the model loads there is nothing to drain
            self._raise(number)
        self._received.append(number)

    def _raise(self, number: int) -> None:
        self.restore()
        signal.raise_signal(number)

    def wait(self) -> None:
        """Returns when the first signal arrives."""
        self._serving = True
        while not self._received:
            self._reader.recv(64)

    def outlast(self, work: Callable[[], None]) -> None:
        """Runs `work` on a thread of its own until it is done, or until a second signal ends everything at once."""
        failed: list[BaseException] = []
        done: list[bool] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001  raised again below, on the main thread
                failed.append(error)
            finally:
                done.append(True)
                self._writer.send(b"\0")

        thread = threading.Thread(target=run, name="drain", daemon=True)
        thread.start()
        while not done and len(self._received) < 2:
            self._reader.recv(64)
        if len(self._received) > 1:
            self._raise(self._received[1])
        if failed:
            raise failed[0]

    def restore(self) -> None:
        """Gives the signals back to whoever had them. Safe to call twice."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._before_fd)
