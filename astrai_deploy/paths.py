"""Where things lie: the shipped data folders, the user's own configurations, caches and state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

_PACKAGE = Path(__file__).resolve().parent
_APP = "astrai-deploy"


def shipped(name: Literal["conf", "recipes", "csrc"]) -> Path:
    """A data folder of this distribution: inside the package in a wheel, beside it in a checkout."""
    for base in (_PACKAGE, _PACKAGE.parent):
        if (base / name).is_dir():
            return base / name
    raise FileNotFoundError(f"this installation of astrai-deploy has lost its {name}/ folder; install it again")


def user_dirs(config_dirs: Iterable[str | Path] = (), environ: Mapping[str, str] | None = None) -> list[Path]:
    """The user's own configuration folders, strongest first.

    `--config-dir` in the order given, then $ASTRAI_DEPLOY_CONFIG_PATH (separated like $PATH), then
    $XDG_CONFIG_HOME/astrai-deploy. What was named must exist; the last is optional.

    Raises:
        NotADirectoryError: a named folder is not there; the message says who named it.
    """
    environ = os.environ if environ is None else environ
    named = [(f"--config-dir {folder}", folder) for folder in config_dirs]
    listed = environ.get("ASTRAI_DEPLOY_CONFIG_PATH", "").split(os.pathsep)
    named += [(f"environment ASTRAI_DEPLOY_CONFIG_PATH: {folder}", folder) for folder in listed if folder]
    for said, folder in named:
        if not Path(folder).is_dir():
            raise NotADirectoryError(f"{said}: there is no such folder; create it or leave it out")
    own = _xdg("CONFIG", ".config", environ) / _APP
    found = [Path(folder).resolve() for _, folder in named] + ([own.resolve()] if own.is_dir() else [])
    return list(dict.fromkeys(found))


def cache_dir(declared: str = "auto", environ: Mapping[str, str] | None = None) -> Path:
    """Where downloads and built files go: `run.cache`, or $XDG_CACHE_HOME/astrai-deploy for `auto`. Creates nothing."""
    return _xdg("CACHE", ".cache", environ) / _APP if declared == "auto" else Path(declared).expanduser()


def state_dir(declared: str = "auto", environ: Mapping[str, str] | None = None) -> Path:
    """Where runs leave their records: `run.dir`, or $XDG_STATE_HOME/astrai-deploy for `auto`. Creates nothing."""
    return _xdg("STATE", ".local/state", environ) / _APP if declared == "auto" else Path(declared).expanduser()


def shown(path: Path) -> str:
    """A path as people read it: `conf/...` and `recipes/...` when shipped, relative inside the working directory."""
    for name in ("conf", "recipes"):
        base = shipped(name)
        if path.is_relative_to(base):
            return f"{name}/{path.relative_to(base).as_posix()}"
    here = Path.cwd()
    return path.relative_to(here).as_posix() if path.is_relative_to(here) else str(path)


def _xdg(what: str, fallback: str, environ: Mapping[str, str] | None) -> Path:
    """The base-directory specification: an empty or relative value counts as unset."""
    given = (os.environ if environ is None else environ).get(f"XDG_{what}_HOME", "")
    return Path(given) if Path(given).is_absolute() else Path.home() / fallback
