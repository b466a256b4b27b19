"""What every choice in YAML shares: a closed, frozen configuration, and the file name as its registry.

A group is a package of `astrai_runtime` (`kv`, `attention`, ...). In its folder `base.py` is the contract, `_name.py` is
shared machinery and every other file is a choice: `kv/paged.py` is what `kind: paged` means. Each choice assigns the
class that it offers to `PART`. Other distributions add choices through the entry-point group `astrai_deploy.parts`,
with names like `kv.mine` that point at a module of the same form.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from types import ModuleType
from typing import Any

from pydantic import BaseModel, ConfigDict

from astrai_runtime.errors import UnknownPart

ENTRY_POINTS = "astrai_deploy.parts"


class Config(BaseModel):
    """A frozen piece of configuration: unknown keys are errors, and YAML states the defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=False)


class PartConfig(Config):
    """The options of one choice. `kind` is the name of the file that obeys them."""

    kind: str


def _foreign(group: str) -> dict[str, importlib.metadata.EntryPoint]:
    prefix = f"{group}."
    found = importlib.metadata.entry_points(group=ENTRY_POINTS)
    return {point.name.removeprefix(prefix): point for point in found if point.name.startswith(prefix)}


def names(group: str) -> list[str]:
    """The choices of a group, sorted: its public files, then what other distributions registered.

    Imports nothing but the group's (empty) package.
    """
    return sorted(_own(group) | set(_foreign(group)))


def _own(group: str) -> set[str]:
    package = importlib.import_module(f"astrai_runtime.{group}")
    return {
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_") and module.name != "base"
    }


def load(group: str, name: str) -> Any:
    """The class behind one choice. A file of ours wins over another distribution's of the same name.

    Raises:
        UnknownPart: no file of that name; the message lists the names that exist.
    """
    if name in _own(group):
        return importlib.import_module(f"astrai_runtime.{group}.{name}").PART
    foreign = _foreign(group)  # reads every distribution's metadata: milliseconds, so only when it is needed
    if name not in foreign:
        raise UnknownPart(group, name, names(group))
    module: ModuleType = foreign[name].load()
    return module.PART
