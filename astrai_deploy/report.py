"""Sentences about a configuration: the effective values, where they came from, and what they overrode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml
from pydantic import SecretStr

from astrai_deploy._problem import REDACTED, Key, dotted, refusal, sounds_secret
from astrai_deploy._shape import Shape
from astrai_deploy.compose import Composed, split
from astrai_deploy.schema import Deployment
from astrai_runtime.errors import did_you_mean


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, lists in one line: as a person writes them."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=all(not isinstance(v, dict) for v in value))


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def effective(composed: Composed) -> dict[str, Any]:
    """The validated configuration as plain values, secrets hidden."""
    found: dict[str, Any] = composed.deployment.model_dump(mode="json")
    return {name: _hidden(value, (name,)) for name, value in found.items()}


def config_yaml(composed: Composed) -> str:
    """The effective configuration as YAML; comments say which recipe it is and what shadows shipped files."""
    notes = [f"# +recipe={composed.recipe}\n"] if composed.recipe else []
    notes += [f"# {own} shadows the shipped {shipped}\n" for own, shipped in composed.shadowed.items()]
    return "".join(notes) + yaml.dump(effective(composed), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def config_json(composed: Composed) -> str:
    """The effective configuration, the origin of each value, and the files, for programs."""
    config = effective(composed)
    origins = {dotted(key): str(composed.origins.find(key)) for key, _ in _leaves(config)}
    told = {
        "recipe": composed.recipe,
        "config": config,
        "origins": origins,
        "files": list(composed.files),
        "shadowed": dict(composed.shadowed),
    }
    return json.dumps(told, indent=2, ensure_ascii=False) + "\n"


def why(composed: Composed, key_text: str) -> list[str]:
    """A line for each value at or below a key: the value, where it comes from, and what it overrode.

    Raises:
        ConfigError: there is no such key.
    """
    key = split(key_text)
    every = dict(_leaves(effective(composed)))
    below = {at: value for at, value in every.items() if at[: len(key)] == key}
    if not below:
        known = {dotted(at[:length]) for at in every for length in range(1, len(at) + 1)}
        there = did_you_mean(key_text, known) or f"; at the top there are: {', '.join(Deployment.model_fields)}"
        raise refusal(f"--why: there is no key '{key_text}'{there}")
    return [_because(composed, at, value, alone=at == key) for at, value in below.items()]


def _because(composed: Composed, at: Key, value: Any, *, alone: bool) -> str:
    shape = Shape.of(Deployment).at(at, composed.data)
    secret = sounds_secret(at) or (shape is not None and shape.holds(SecretStr))
    origin = composed.origins.find(at) or "nothing declares it; it is empty"
    earlier = composed.overridden(dotted(at))
    over = ", ".join(f"over {REDACTED if secret else old.value} from {old.origin}" for old in earlier)
    plain = isinstance(value, str) and value and "\n" not in value
    shown = value if plain else yaml.safe_dump(value, default_flow_style=True, width=10**9).partition("\n")[0]
    return f"{'' if alone else dotted(at) + ': '}{shown}  {origin}{f' ({over})' if over else ''}"


def _leaves(value: Any, at: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Scalars and lists; an empty mapping is a value of its own."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, (*at, name))
    else:
        yield at, value


def _hidden(value: Any, at: Key) -> Any:
    """Free-form sections may hold secrets under names that the schema does not know."""
    if isinstance(value, dict):
        return {name: _hidden(inner, (*at, name)) for name, inner in value.items()}
    if isinstance(value, str) and value and sounds_secret(at[-1:]):
        return REDACTED
    return value
