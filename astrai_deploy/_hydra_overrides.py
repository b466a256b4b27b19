"""What was typed on the command line -> overrides for Hydra, with every mistake found before Hydra stops at the first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from astrai_deploy._problem import REDACTED, Key, Origin, Problem, dotted, sounds_secret
from astrai_deploy.schema import LIST_GROUPS
from astrai_runtime.errors import did_you_mean

MAX_KEY = 200  # longer ones cannot be file names


@dataclass
class Overrides:
    """`lines` are for Hydra; `said` gives each line as people may read it: as it was typed, secrets hidden."""

    lines: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    values: list[tuple[Override, str]] = field(default_factory=list)  # the same without choices of groups
    recipes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def prepare(loader: ConfigLoaderImpl, typed: Iterable[str]) -> Overrides:
    """Checks group choices, and lets every other key through by force: the schema says more about an unknown one.

    `recipe=NAME` means `+recipe=NAME`: no deployment has a recipe by default.
    """
    result = Overrides()
    parser = OverridesParser.create()
    for text in typed:
        key_text = text.partition("=")[0].lstrip("+~")
        said = f"{text.partition('=')[0]}={REDACTED}" if "=" in text and sounds_secret((key_text,)) else text
        origin = Origin(f"command line: {said}")
        try:
            if not 0 < len(key_text) < MAX_KEY:
                raise OverrideParseException(text, "no key")
            (override,) = parser.parse_overrides([text])
        except OverrideParseException:
            message = (
                "this is not key=value"
                if "=" not in text or not 0 < len(key_text) < MAX_KEY
                else "this value is not valid here; quote it for both the shell and us: 'key=\"value\"'"
            )
            result.problems.append(Problem(origin, (), message))
            continue
        problem = _problem(loader, override, origin)
        if problem is not None:
            result.problems.append(problem)
            continue
        if override.key_or_group == "recipe" and not override.is_delete():
            chosen = override.value()
            result.recipes = [str(name) for name in chosen] if isinstance(chosen, list) else [str(chosen)]
        line = _line(loader, override, text)
        result.lines.append(line)
        if override.package is None and not _is_group(loader, override):
            result.values.append((override, said))
        result.said[line] = said
    return result


def _is_group(loader: ConfigLoaderImpl, override: Override) -> bool:
    """Hydra's own rule: a mapping for a group's name is a value, anything else a choice."""
    return bool(loader.repository.group_exists(override.key_or_group)) and not isinstance(override.value(), dict)


def _line(loader: ConfigLoaderImpl, override: Override, text: str) -> str:
    if override.package is not None or override.is_delete():
        return text
    if _is_group(loader, override):
        return f"+{text}" if override.key_or_group == "recipe" and not text.startswith("+") else text
    return f"++{text.lstrip('+')}"


def _problem(loader: ConfigLoaderImpl, override: Override, origin: Origin) -> Problem | None:
    group = override.key_or_group
    key: Key = (group,)
    if group.partition(".")[0].partition("/")[0] == "hydra":
        return Problem(origin, key, "Hydra's own settings go with Hydra's own flags (-m, --cfg, --info)")
    if override.is_sweep_override():
        return Problem(origin, key, "several values are a sweep: add -m, or quote them as one value")
    if override.is_delete() or not _is_group(loader, override):
        return None
    value = override.value()
    if value is None:
        return Problem(
            origin,
            key,
            f"a group cannot be null; {group}=[] is an empty list"
            if group in LIST_GROUPS
            else "a group cannot be null; name an option",
        )
    if isinstance(value, list) and group not in (*LIST_GROUPS, "recipe"):
        return Problem(origin, key, "takes one choice, not a list")
    known = loader.get_group_options(group, ObjectType.CONFIG)
    for name in value if isinstance(value, list) else [value]:
        if not loader.repository.config_exists(f"{group}/{name}"):
            there = ", ".join(known) or "none"
            return Problem(
                origin, key, f"no {dotted(key)} named '{name}'; there are: {there}{did_you_mean(str(name), known)}"
            )
    return None
