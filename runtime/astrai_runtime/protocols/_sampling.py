"""A request's sampling fields over the declared defaults: a value is honoured by a declared stage, or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from astrai_runtime.errors import InvalidRequest
from astrai_runtime.protocols._errors import pointer_of, shown
from astrai_runtime.protocols.base import Served
from astrai_runtime.request import SamplingParams
from astrai_runtime.sampling.base import Knob

_NEUTRAL = {field.name: field.default for field in dataclasses.fields(SamplingParams) if field.name != "extra"}
MAX_BIASES = 1024
MAX_BIAS = 100.0


def read_sampling(given: Mapping[str, Any], served: Served) -> SamplingParams:
    """`given` maps knob names to values; None is "not said". `logit_bias` and `seed` are read too.

    Raises:
        InvalidRequest: out of a knob's range, or no stage of the declared pipeline obeys a value that is not neutral.
    """
    knobs = {knob.name: knob for knob in served.knobs}
    fields: dict[str, Any] = {}
    extra = dict(served.defaults.extra)
    for name, value in given.items():
        if value is None:
            continue
        if name == "seed":
            fields[name] = value
        elif name == "logit_bias":
            fields[name] = _biases(value, served)
        elif name in knobs:
            number = _within(knobs[name], value)
            if name in _NEUTRAL:
                fields[name] = number
            else:
                extra[name] = number
        elif value != _NEUTRAL[name] and not (name == "top_k" and value == -1):
            raise _absent(name, f"leave it out or send {_NEUTRAL[name]:g}", served)
    return dataclasses.replace(served.defaults, **fields, extra=extra)


def _absent(name: str, advice: str, served: Served) -> InvalidRequest:
    there = ", ".join([*(knob.name for knob in served.knobs), *served.fields]) or "none"
    return InvalidRequest(
        f"no stage of this deployment's sampling pipeline obeys '{name}'; it obeys: {there}; {advice}", param=f"/{name}"
    )


def _within(knob: Knob, value: Any) -> float:
    place = f"/{knob.name}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"'{knob.name}' is a number, not {shown(repr(value))}", param=place)
    if knob.name == "top_k" and value == -1:
        return 0  # what several clients send for "off"
    if knob.integer and not isinstance(value, int):
        raise InvalidRequest(f"'{knob.name}' is a whole number, not {value!r}", param=place)
    if value < knob.low or value > knob.high or (knob.above_low and value == knob.low):
        low = f"above {knob.low:g}" if knob.above_low else f"from {knob.low:g}"
        raise InvalidRequest(f"'{knob.name}' goes {low} to {knob.high:g}, not {value!r}", param=place)
    return value


def _biases(given: Mapping[str, float], served: Served) -> tuple[tuple[int, float], ...]:
    if given and "logit_bias" not in served.fields:
        raise _absent("logit_bias", "leave it out", served)
    if len(given) > MAX_BIASES:
        raise InvalidRequest(f"'logit_bias' holds at most {MAX_BIASES} tokens, not {len(given)}", param="/logit_bias")
    size = served.model.vocab_size or 10**9  # 0: nobody knows it here
    biases: dict[int, float] = {}
    for key, value in given.items():
        place = pointer_of(["logit_bias", key])
        if not (key.isascii() and key.isdigit() and len(key) < 10) or int(key) >= size:
            raise InvalidRequest(f"'logit_bias' is keyed by token ids from 0 to {size - 1}, not '{key[:20]}'", param=place)
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise InvalidRequest(f"a bias goes from -100 to 100, not {value!r}", param=place)
        biases[int(key)] = float(value)
    return tuple(sorted(biases.items()))
