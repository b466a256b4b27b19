"""Where each key came from, and what it overrode: the files of one composition, walked in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.types import Override

from astrai_deploy._hydra_sources import Loader, ShippedOptions
from astrai_deploy._problem import Key, Origin, Problem
from astrai_deploy._yaml import leaves, read, written
from astrai_deploy.paths import shown


@dataclass(frozen=True)
class Setting:
    """One value that a key was given: what was written, and where."""

    value: str
    origin: Origin


@dataclass
class Origins:
    """Every key's settings, the last one in force. Lists replace, mappings merge."""

    settings: dict[Key, list[Setting]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)  # in the order of composition, as people read them
    shadowed: dict[str, str] = field(default_factory=dict)  # a user's file -> the shipped file that it replaces

    def find(self, key: Key) -> Origin | None:
        """Where a key was set; failing that the nearest mapping around it, or the first key inside it."""
        for length in range(len(key), 0, -1):
            if self.settings.get(key[:length]):
                return self.settings[key[:length]][-1].origin
        inside = (own[-1].origin for path, own in self.settings.items() if path[: len(key)] == key and own)
        return next(inside, None) if key else None

    def history(self, key: Key) -> Sequence[Setting]:
        """What a key was set to, oldest first; the last is in force."""
        return self.settings.get(key, [])

    def set(self, key: Key, value: str, origin: Origin, *, replaces: bool = True) -> None:
        """A key gets a value. replaces: whatever was inside it is gone (a list, a scalar), instead of merged."""
        if replaces:
            self.forget_inside(key)
        for length in range(1, len(key)):  # a mapping takes the place of a scalar
            above = self.settings.get(key[:length])
            if above and above[-1].value and isinstance(key[length], str):
                del self.settings[key[:length]]
        self.settings.setdefault(key, []).append(Setting(value, origin))

    def forget_inside(self, key: Key) -> None:
        for old in [path for path in self.settings if len(path) > len(key) and path[: len(key)] == key]:
            del self.settings[old]

    def forget(self, key: Key) -> None:
        """A key was deleted."""
        self.forget_inside(key)
        self.settings.pop(key, None)

    def add_file(self, file: Path, package: Key) -> None:
        """Lays a file's keys over what is known."""
        name = shown(file)
        tree = read(file)[1]
        if name not in self.files:
            self.files.append(name)
        if tree is None:
            return
        for leaf in leaves(tree, name):
            if leaf.key[0] == "defaults" or (leaf.key[0] == "hydra" and not package):
                continue
            key = (*package, *leaf.key)
            if leaf.origin.raw == "???" and self.settings.get(key):  # a missing value does not undo one that is there
                continue
            mapping = isinstance(leaf.node, yaml.MappingNode)
            self.set(key, "" if mapping else written(leaf.node), leaf.origin, replaces=not mapping)


def trace(loader: Loader, overrides: Iterable[tuple[Override, str]]) -> Origins:
    """Walks the files that `loader` has just composed, then the overrides, each with its text as people may read it."""
    origins = Origins()
    for name, holders, package in _composed(loader):
        file = holders[0].file(name)
        origins.add_file(file, package)
        if holders[0].foreign:
            hidden = [source.file(name) for source in holders[1:] if not source.foreign]
            origins.shadowed.update({shown(file): shown(other) for other in hidden})
    for override, said in overrides:
        _add_override(origins, override, said)
    return origins


def clash(loader: Loader) -> Problem | None:
    """Where one file has a list and another a mapping: Hydra cannot merge them and does not say where."""
    known: dict[Key, Origin] = {}
    lists: dict[Key, bool] = {}
    for name, holders, package in _composed(loader):
        file = holders[0].file(name)
        tree = read(file)[1]
        for leaf in leaves(tree, shown(file)) if tree is not None else ():
            key = (*package, *leaf.key)
            if isinstance(leaf.node, yaml.SequenceNode | yaml.MappingNode) and leaf.key[0] != "defaults":
                is_list = isinstance(leaf.node, yaml.SequenceNode)
                if lists.get(key, is_list) != is_list:
                    here, there = ("a list", "a mapping") if is_list else ("a mapping", "a list")
                    return Problem(leaf.origin, key, f"{here} cannot take the place of {there} ({known[key]})")
                lists[key], known[key] = is_list, leaf.origin
            if package and package not in lists:
                lists[package], known[package] = False, Origin(shown(file), 1, 1)
    return None


def _composed(loader: Loader) -> Iterator[tuple[str, list[ShippedOptions], Key]]:
    """Each composed configuration of ours: its name, the sources that have it, the strongest first, and its package."""
    ours = [source for source in loader.get_sources() if isinstance(source, ShippedOptions)]
    for default in loader.composed:
        name = str(default.config_path or "")
        holders = [source for source in ours if name and source.is_config(name)]
        if holders and name.partition("/")[0] != "hydra":
            yield name, holders, tuple(part for part in (default.package or "").split(".") if part)


def _add_override(origins: Origins, override: Override, typed: str) -> None:
    key: Key = tuple(int(part) if part.isdigit() else part for part in override.key_or_group.split("."))
    if override.is_delete():
        origins.forget(key)
        return
    raw = typed.partition("=")[2]
    for depth in range(2, len(key)):  # mappings that only this override makes
        if not any(known[:depth] == key[:depth] for known in origins.settings):
            origins.set(key[:depth], "", Origin(f"command line: {typed}"), replaces=False)
    for path, value in _inside(key, override.value()):
        mapping = isinstance(value, dict)
        text = "" if mapping else raw if path == key else str(value)
        quoted = raw[:1] in ("'", '"', "[", "{")
        plain = (None if quoted else raw) if path == key else str(value) if type(value) is int else None
        origins.set(path, text, Origin(f"command line: {typed}", raw=plain), replaces=not mapping)


def _inside(key: Key, value: Any) -> Iterator[tuple[Key, Any]]:
    yield key, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in items:
        yield from _inside((*key, name), inner)
