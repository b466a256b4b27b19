"""`astrai-deploy [VERB] [OPTION...] [KEY=VALUE...]`: verbs in front, Hydra's grammar behind."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from astrai_deploy._collector import paused
from astrai_deploy._laps import Laps
from astrai_deploy._problem import ConfigError, refusal
from astrai_runtime.errors import (
    AstraiError,
    BackendRefused,
    KernelError,
    SourceError,
    UnknownPart,
    WeightsError,
    did_you_mean,
)

VERBS = {
    "serve": "run the service (this is what happens without a verb)",
    "plan": "say what would run, why, and whether it fits, without reading weights",
    "config": "print the effective configuration, or where a value comes from (--why KEY)",
    "chat": "talk to the model in this terminal, without HTTP",
    "fetch": "download or assemble the model's files, then stop",
    "kernels check": "say what there is of the native CPU kernels, and why not",
    "kernels build": "compile them now instead of at the first start",
}
FLAGS = {
    "--config-dir D": "a folder of your own options and recipes; may be repeated, the first is the strongest",
    "--json": "for programs (plan, config)",
    "--into D": "also put the compiled kernels below a folder, as a wheel carries them (kernels build)",
    "--why KEY": "value, origin, and what it overrode (config)",
    "--debug": "tracebacks instead of one line",
    "--version": "the version of this program",
    "--help, -h": "this text",
}
# Hydra's own; each hands over to Hydra. Those with a value may take it after a space.
HYDRA_FLAGS = ("--cfg", "-c", "--info", "-i", "--shell-completion", "-sc", "-m", "--multirun", "--hydra-help")
HYDRA_DETAILS = ("--resolve", "--package", "-p")
HYDRA_VALUES = ("--cfg", "-c", "--info", "-i", "--package", "-p")
ACTIONS = {"kernels": ("check", "build")}  # verbs of two words
OK, CRASH, CONFIG, DOES_NOT_FIT, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 3, 130, 141


@dataclass(frozen=True)
class Invocation:
    """What was typed, taken apart."""

    verb: str = "serve"
    action: str = ""  # the second word of a verb of two
    overrides: list[str] = field(default_factory=list)
    config_dirs: list[str] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)  # flags for Hydra and their values
    json: bool = False
    why: str | None = None
    into: str | None = None
    debug: bool = False
    help: bool = False
    version: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code.

    0 ok, 1 crash, 2 configuration, 3 does not fit, 130 interrupted; SIGTERM ends a process with 143.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        with paused():
            return _run(parse(arguments))
    except ConfigError as error:
        placed = any(problem.origin or problem.key for problem in error.problems)
        return _fail(CONFIG, f"astrai-deploy: {'the configuration is not valid' + chr(10) if placed else ''}{error}", debug)
    except (UnknownPart, SourceError, WeightsError, KernelError, BackendRefused) as error:
        return _fail(CONFIG, f"astrai-deploy: {error}", debug)
    except NotADirectoryError as error:
        return _fail(CONFIG, f"astrai-deploy: {error}", debug)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: `config | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except AstraiError as error:
        return _fail(CRASH, f"astrai-deploy: {error}", debug)
    except Exception as error:  # noqa: BLE001  the last resort: one line for people, the rest on request
        reason = " ".join(str(error).split()) or "no message"
        return _fail(CRASH, f"astrai-deploy: {type(error).__name__}: {reason}; --debug shows where", debug)


def parse(arguments: Sequence[str]) -> Invocation:
    """Takes a command line apart.

    Raises:
        ConfigError: an unknown verb or flag, or a flag without its value.
    """
    rest = iter(arguments)
    found = Invocation()
    verbs = _verbs()
    for position, word in enumerate(rest):
        name, equals, value = word.partition("=")
        if position == 0 and word in verbs:
            found = replace(found, verb=word)
        elif position == 0 and word.isidentifier():
            raise refusal(f"there is no verb '{word}'; there are: {', '.join(verbs)}{did_you_mean(word, verbs)}")
        elif position == 1 and word in ACTIONS.get(found.verb, ()):
            found = replace(found, action=word)
        elif name in ("--config-dir", "-cd"):
            found.config_dirs.append(value if equals else _next(rest, word))
        elif name == "--why":
            found = replace(found, why=value if equals else _next(rest, word))
        elif name == "--into":
            found = replace(found, into=value if equals else _next(rest, word))
        elif word in ("--json", "--debug", "--version", "--help", "-h"):
            found = _switch(found, "help" if word == "-h" else word.removeprefix("--"))
        elif name in (*HYDRA_FLAGS, *HYDRA_DETAILS):
            found.hydra.append(word)
            if name in HYDRA_VALUES and not equals:
                found.hydra.append(_next(rest, word))
        elif word.startswith("-"):
            known = [*(flag.split()[0].strip(",") for flag in FLAGS), *HYDRA_FLAGS, *HYDRA_DETAILS]
            raise refusal(f"there is no flag '{name}'; --help lists them{did_you_mean(name, known)}")
        else:
            found.overrides.append(word)
    if found.why is not None and found.verb != "config":
        raise refusal("--why goes with the verb config: astrai-deploy config --why KEY")
    if found.into is not None and found.action != "build":
        raise refusal("--into goes with the verb kernels build: astrai-deploy kernels build --into DIR")
    if found.verb in ACTIONS and not found.action and not found.help:
        wanted = " or ".join(f"astrai-deploy {found.verb} {action}" for action in ACTIONS[found.verb])
        raise refusal(f"the verb {found.verb} has two words: {wanted}")
    if found.json and found.verb not in ("plan", "config"):
        raise refusal("--json goes with the verbs plan and config")
    return found


def _verbs() -> list[str]:
    """The first words that mean a verb."""
    return list(dict.fromkeys(verb.split()[0] for verb in VERBS))


def _switch(found: Invocation, name: str) -> Invocation:
    return Invocation(**{**vars(found), name: True})


def _next(rest: Iterator[str], flag: str) -> str:
    value = next(rest, None)
    if value is None:
        raise refusal(f"{flag} needs a value")
    return value


def _run(asked: Invocation) -> int:
    if asked.help:
        from astrai_deploy._help import help_text

        sys.stdout.write(help_text(asked.config_dirs, VERBS, FLAGS))
        return OK
    if asked.version:
        import importlib.metadata

        sys.stdout.write(f"astrai-deploy {importlib.metadata.version('astrai-deploy')}\n")
        return OK
    if asked.hydra:
        from astrai_deploy import _hydra_flags

        arguments = [*asked.hydra, *asked.overrides]
        return _hydra_flags.run(arguments, asked.config_dirs, list(VERBS), lambda own: _cell(asked, own))
    return _verb(asked)


def _cell(asked: Invocation, overrides: list[str]) -> int:
    """One cell of a sweep; a mistake in one does not keep the others from running."""
    try:
        return _verb(replace(asked, overrides=overrides))
    except (ConfigError, UnknownPart, SourceError, WeightsError, KernelError, BackendRefused) as error:
        return _fail(CONFIG, f"astrai-deploy: {error}", asked.debug)


def _verb(asked: Invocation) -> int:
    laps = Laps()
    from astrai_deploy.compose import compose

    composed = compose(asked.overrides, asked.config_dirs)
    laps.lap("configuration")
    if asked.verb == "config":
        from astrai_deploy import report

        if asked.why is not None:
            lines = report.why(composed, asked.why)
            sys.stdout.write("".join(f"{line}\n" for line in lines))
        else:
            sys.stdout.write(report.config_json(composed) if asked.json else report.config_yaml(composed))
        sys.stdout.flush()
        return OK
    if asked.verb == "plan":
        from rich.console import Console

        from astrai_deploy.plan import make_plan
        from astrai_deploy.plan_report import plan_json, print_plan

        plan = make_plan(composed)
        if asked.json:
            sys.stdout.write(json.dumps(plan_json(plan, composed), indent=2, ensure_ascii=False) + "\n")
        else:
            print_plan(plan, composed, Console())
        return OK if plan.fits else DOES_NOT_FIT
    if asked.verb == "chat":
        from astrai_deploy.chat import chat

        return chat(composed)
    if asked.verb == "fetch":
        from astrai_deploy.build import fetch

        return fetch(composed)
    if asked.verb == "kernels":
        from astrai_deploy.kernels import kernels

        return kernels(composed, asked.action, asked.into)
    from astrai_deploy.service import serve

    return serve(composed, laps)


def _fail(code: int, message: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    sys.stderr.write(f"{message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
