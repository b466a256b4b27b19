"""Plain data -> a Deployment, or every problem with its place: types, unknown keys, YAML's surprises, broken rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic_core import ErrorDetails

from astrai_deploy._problem import REDACTED, ConfigError, Key, Problem, dotted, sounds_secret
from astrai_deploy._rules import broken_rules
from astrai_deploy._shape import Shape
from astrai_deploy.origins import Origins
from astrai_deploy.schema import Deployment
from astrai_runtime.errors import did_you_mean

_SURPRISING_INT = re.compile(r"[-+]?(0[0-7_]*[0-7]|\d[\d_]*(:[0-5]?\d)+)")


def check(data: dict[str, Any], origins: Origins, problems: list[Problem]) -> Deployment:
    """Validates; `problems` are those that are already known, about values that are None in `data`.

    Text fields get their text back as it was written (`api key 0123`, `no`), which edits `data`.

    Raises:
        ConfigError: everything that is wrong.
    """
    known = {problem.key for problem in problems}
    named_code = [(key, "YAML names parts by their kind, never code; remove this key") for key in _targets(data)]
    problems = [*problems, *(Problem(origins.find(key), key, message) for key, message in named_code)]
    deployment, errors = _validate(data)
    if _restore_text(data, origins, errors):
        deployment, errors = _validate(data)
    found = [_explain(key, group, data, origins) for key, group in _by_key(errors, data) if key not in known]
    bad = {problem.key[:1] for problem in (*problems, *found)}
    good = {name: value for name, value in data.items() if (name,) not in bad}
    groups = vars(deployment) if deployment is not None else _partial(good)
    surprises = list(_yaml_surprises(good, groups, origins))
    odd = {key[0] for key, _ in surprises}
    broken = [*surprises, *broken_rules({name: group for name, group in groups.items() if name not in odd})]
    found += [Problem(origins.find(key), key, message) for key, message in broken]
    if problems or found or deployment is None:
        raise ConfigError([*problems, *found])
    return deployment


def _targets(data: Any, at: Key = ()) -> Iterator[Key]:
    if isinstance(data, dict):
        yield from [(*at, "_target_")] if "_target_" in data else []
    for name, inner in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from _targets(inner, (*at, name))


def _validate(data: dict[str, Any]) -> tuple[Deployment | None, list[ErrorDetails]]:
    try:
        return Deployment.model_validate(data), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


def _partial(good: dict[str, Any]) -> dict[str, Any]:
    """The groups that are valid, as objects: rules can look at them although others are not."""
    found: dict[str, Any] = {}
    for name, value in good.items():
        shape = Shape.of(Deployment).inside(name, good)
        if shape is not None:
            try:
                found[name] = shape.validate(value)
            except ValidationError:  # it has been reported already
                continue
    return found


def _by_key(errors: list[ErrorDetails], data: Any) -> Iterator[tuple[Key, list[ErrorDetails]]]:
    groups: dict[Key, list[ErrorDetails]] = {}
    for error in errors:
        groups.setdefault(_key(error, data), []).append(error)
    yield from groups.items()


def _key(error: ErrorDetails, data: Any) -> Key:
    """pydantic's location without what YAML has no level for: tags of unions. A whole group's rule may name its key."""
    key: list[str | int] = []
    for part in error["loc"]:
        there = (isinstance(data, dict) and part in data) or (
            isinstance(data, list) and isinstance(part, int) and part < len(data)
        )
        if there:
            key.append(part)
            data = data[part]
        elif isinstance(data, dict) and error["type"] in ("missing", "extra_forbidden"):
            key.append(part)
            data = None
    word = re.match(r"(?:Value error, )?(\w+)\b", error["msg"])
    if error["type"] == "value_error" and word and isinstance(data, dict) and word[1] in data:
        key.append(word[1])
    return tuple(key)


def _explain(key: Key, errors: list[ErrorDetails], data: dict[str, Any], origins: Origins) -> Problem:
    error = errors[0]
    if error["type"] == "extra_forbidden":
        return Problem(origins.find(key), key, _unknown(key, data, origins))
    if error["type"] == "missing":
        return Problem(origins.find(key[:-1]) if key[:-1] else None, key, "no value given")
    shape = Shape.of(Deployment).at(key, data)
    message = " or ".join(dict.fromkeys(_sentence(one) for one in errors)).replace(" or must be ", " or ")
    value = error["input"]
    if error["type"] == "unknown_kind":
        key = (*key, "kind")
    if error["type"] in ("not_a_mapping", "no_kind", "unknown_kind", "value_error") or isinstance(value, dict):
        return Problem(origins.find(key), key, message)
    secret = sounds_secret(key) or (shape is not None and shape.holds(SecretStr))
    near = ""
    if isinstance(value, str) and not secret:
        expected = " ".join(str(one.get("ctx", {}).get("expected", "")) for one in errors)
        choices = re.findall(r"'([^']*)'", expected)
        same = [choice for choice in choices if choice.casefold() == value.casefold()]
        near = f"; did you mean '{same[0]}'?" if same else did_you_mean(value, choices)
    return Problem(origins.find(key), key, f"{message} (got {REDACTED if secret else _short(value)}){near}")


def _sentence(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ").partition(", unable to parse")[0]
    message = message.replace("could not parse value and unit from byte string", "must be a size such as 4 GiB")
    message = re.sub("^String should", "must", message)
    message = message.replace("valid tuple", "list").replace("valid dictionary", "mapping of keys to values")
    return re.sub(r"^Input should be (a valid )?", lambda found: "must be " + ("a valid " if found[1] else ""), message)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unknown(key: Key, data: dict[str, Any], origins: Origins) -> str:
    name = str(key[-1])
    if key == ("recipe",):
        return "a recipe is chosen with +recipe=NAME"
    above = Shape.of(Deployment).at(key[:-1], data)
    if above is None:
        return f"unknown key '{name}'"
    owners = above.kinds_with(name)
    if owners:
        at = dotted(key[:-1])
        kind = origins.find((*key[:-1], "kind"))
        return f"'{name}' belongs to {at}.kind={'|'.join(owners)}, but {at}.kind is '{above.kind}' ({kind})"
    known = above.fields()
    near = did_you_mean(name, known)
    return f"unknown key '{name}'{near or '; there are: ' + ', '.join(known)}"


def _restore_text(data: dict[str, Any], origins: Origins, errors: list[ErrorDetails]) -> bool:
    """Gives text fields what was written, where YAML had made a number, a date or a boolean of it."""
    changed = False
    for error in errors:
        if error["type"] != "string_type" or not isinstance(error["input"], bool | int | float):
            continue
        key = _key(error, data)
        raw = next((setting.origin.raw for setting in reversed(origins.history(key))), None)
        holder: Any = data
        for part in key[:-1]:
            holder = holder[part]
        if raw is not None and "${" not in raw:
            holder[key[-1]] = raw
            changed = True
    return changed


def _yaml_surprises(data: Any, value: Any, origins: Origins, at: Key = ()) -> Iterator[tuple[Key, str]]:
    """Numbers that were not meant as such: `yes` is no 1, `010` no 8, `12:30` no 750."""
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(data, dict) and isinstance(value, dict):
        for name in data:
            if name in value:
                yield from _yaml_surprises(data[name], value[name], origins, (*at, name))
    elif isinstance(data, list) and isinstance(value, list | tuple):
        for index, (one, other) in enumerate(zip(data, value, strict=False)):
            yield from _yaml_surprises(one, other, origins, (*at, index))
    elif isinstance(data, bool) and isinstance(value, int | float) and not isinstance(value, bool):
        yield at, f"must be a number (got {str(data).lower()})"
    elif isinstance(data, int) and isinstance(value, int | float) and not isinstance(data, bool):
        raw = next((setting.origin.raw for setting in reversed(origins.history(at))), None)
        if raw and _SURPRISING_INT.fullmatch(raw):
            yield (
                at,
                f"YAML reads {raw} as {data}; write {data}, or the number that you mean, without a leading 0 or a colon",
            )
