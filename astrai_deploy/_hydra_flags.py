"""Hydra's own flags over our search path: --cfg, --info, -m, --shell-completion, --hydra-help, --package, --resolve.

`--cfg job --resolve` prints what Hydra composed, before our schema sees it: secrets appear in the clear. `config` hides
them.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from astrai_deploy._hydra_sources import search_path
from astrai_deploy._problem import refusal
from astrai_deploy.compose import PRIMARY

Task = Callable[[list[str]], int]  # one cell's overrides -> exit code


def run(arguments: Sequence[str], config_dirs: Sequence[str | Path], verbs: Sequence[str], task: Task) -> int:
    """Does what Hydra's main does for these arguments; each cell of `-m` runs `task`. Returns the worst exit code.

    Raises:
        ConfigError: Hydra refuses.
    """
    parser = get_args_parser()
    parser.prog = "astrai-deploy"
    options = parser.parse_args(list(arguments))
    overrides = [f"+{text}" if text.startswith("recipe=") else text for text in options.overrides]
    version.setbase("1.3")
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level  # --info takes the root logger over
    hydra = Hydra.create_main_hydra2(task_name="astrai-deploy", config_search_path=search_path(config_dirs))
    try:
        return _obey(hydra, options, overrides, verbs, task)
    except (HydraException, OmegaConfBaseException) as error:
        reason = str(error) or str(error.__cause__)
        raise refusal(" ".join(reason.split())) from None
    finally:
        GlobalHydra.instance().clear()
        root.handlers[:], root.level = handlers, level


def _obey(hydra: Hydra, options: Namespace, overrides: list[str], verbs: Sequence[str], task: Task) -> int:
    wanted = [options.multirun, bool(options.cfg), bool(options.info), options.shell_completion, options.hydra_help]
    if sum(map(bool, wanted)) != 1:
        raise refusal("choose exactly one of -m, --cfg, --info, --shell-completion and --hydra-help")
    if options.resolve and not options.cfg:
        raise refusal("--resolve goes with --cfg")
    if options.cfg:
        hydra.show_cfg(PRIMARY, overrides, options.cfg, options.package, options.resolve)
    elif options.info:
        hydra.show_info(options.info, PRIMARY, overrides)
    elif options.shell_completion:
        _hide_verb(verbs)
        hydra.shell_completion(PRIMARY, overrides)
    elif options.hydra_help:
        hydra.hydra_help(PRIMARY, get_args_parser(), options)
    else:
        return _multirun(hydra, overrides, task)
    return 0


def _multirun(hydra: Hydra, overrides: list[str], task: Task) -> int:
    codes: list[int] = []

    def cell(config: DictConfig) -> int:
        own = [str(text) for text in HydraConfig.get().overrides.task]
        sys.stdout.write(f"{'' if not codes else chr(10)}# {shlex.join(own)}\n")
        sys.stdout.flush()
        codes.append(task(own))
        return codes[-1]

    hydra.multirun(PRIMARY, cell, overrides, with_log_configuration=False)
    return max(codes, default=0)


def _hide_verb(verbs: Sequence[str]) -> None:
    """Hydra completes `astrai-deploy OVERRIDES`; it does not know that a verb may stand in front."""
    line = os.environ.get("COMP_LINE", "")
    program, _, rest = line.partition(" ")
    rest = rest.lstrip()
    if found := next((verb for verb in verbs if rest.startswith(f"{verb} ")), None):
        os.environ["COMP_LINE"] = f"{program} {rest.removeprefix(found).lstrip()}"
