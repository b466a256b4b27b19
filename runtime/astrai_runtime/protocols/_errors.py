"""What each error becomes on the wire: one total table from exception class to status and names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from astrai_runtime import errors
from astrai_runtime.errors import AstraiError, Busy, Cancelled, did_you_mean
from astrai_runtime.event import Failed, Outcome

SHOWN = 60  # characters of a client's text that an error repeats


@dataclass(frozen=True, slots=True)
class Wire:
    """HTTP status, and the error's type in the OpenAI and the Anthropic envelope."""

    status: int
    openai: str
    anthropic: str


# An error without a row of its own takes its nearest ancestor's.
TABLE: Mapping[type[AstraiError], Wire] = {
    AstraiError: Wire(500, "server_error", "api_error"),
    errors.BackendRefused: Wire(400, "invalid_request_error", "invalid_request_error"),
    errors.InvalidRequest: Wire(400, "invalid_request_error", "invalid_request_error"),
    errors.Unsupported: Wire(400, "invalid_request_error", "invalid_request_error"),
    errors.Unauthorized: Wire(401, "invalid_request_error", "authentication_error"),
    errors.Forbidden: Wire(403, "invalid_request_error", "permission_error"),
    errors.NotFound: Wire(404, "invalid_request_error", "not_found_error"),
    errors.WrongState: Wire(409, "invalid_request_error", "invalid_request_error"),
    errors.CapacityExceeded: Wire(413, "invalid_request_error", "request_too_large"),
    errors.Busy: Wire(503, "server_error", "overloaded_error"),
    errors.RateLimited: Wire(429, "rate_limit_error", "rate_limit_error"),
    Cancelled: Wire(503, "server_error", "api_error"),
    errors.DeadlineExpired: Wire(504, "server_error", "timeout_error"),
    errors.UpstreamError: Wire(502, "server_error", "api_error"),
    errors.UpstreamTimeout: Wire(504, "server_error", "timeout_error"),
}


def wire(error: AstraiError) -> Wire:
    """The row of an error."""
    return next(TABLE[cls] for cls in type(error).__mro__ if cls in TABLE)


def error_of(outcome: Outcome) -> AstraiError | None:
    """Why an outcome is no answer. A cancelled generation that still has a reader was ended by the service."""
    if isinstance(outcome, Failed):
        return outcome.error
    return Cancelled("the service ended this generation before it was complete") if outcome.reason == "cancelled" else None


def headers(error: AstraiError) -> dict[str, str]:
    """`Retry-After` in whole seconds where trying again helps; which keys are taken where one is missing."""
    if isinstance(error, Busy):
        return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, errors.Unauthorized):
        return {"www-authenticate": "Bearer"}
    return {"retry-after": "1"} if isinstance(error, Cancelled) else {}


def pointer(param: str | None) -> str | None:
    """A JSON pointer (RFC 6901) into the body; the engine names top-level fields without the slash."""
    return param if param is None or param.startswith("/") else f"/{param}"


def shown(name: str) -> str:
    """A name from a request, short enough to be said back."""
    return name if len(name) <= SHOWN else f"{name[:SHOWN]}..."


def path_of(location: Sequence[Any]) -> tuple[str | int, ...]:
    """pydantic's location without the tags of unions, which this package writes in parentheses."""
    return tuple(part for part in location if not str(part).startswith("("))


def pointer_of(location: Sequence[Any]) -> str | None:
    """pydantic's location as a JSON pointer; None for the body as a whole."""
    parts = [shown(str(part)).replace("~", "~0").replace("/", "~1") for part in path_of(location)]
    return f"/{'/'.join(parts)}" if parts else None


@dataclass(frozen=True, slots=True)
class Complaint:
    """Validation errors as one sentence for people, and the first one's code and place for programs."""

    message: str
    code: str
    param: str | None


def complain(found: Sequence[Mapping[str, Any]], known: Iterable[str]) -> Complaint:
    """Sums up pydantic's `ValidationError.errors()`: every problem, at most five. `known` are the fields of this API."""
    names = list(known)
    sentences = []
    for error in found[:5]:
        place = pointer_of(error["loc"])
        said = str(error["msg"])
        if error["type"] == "extra_forbidden":
            said = f"unknown field{did_you_mean(str(error['loc'][-1]), names)}"
        sentences.append(f"{place}: {said}" if place else said)
    if len(found) > 5:
        sentences.append(f"and {len(found) - 5} more")
    codes = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter", "json_invalid": "invalid_json"}
    return Complaint("; ".join(sentences), codes.get(found[0]["type"], "invalid_value"), pointer_of(found[0]["loc"]))


def detail_of(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The seed's 422 body: pydantic's errors with `body` in front of each location."""
    return [{"type": error["type"], "loc": ["body", *path_of(error["loc"])], "msg": error["msg"]} for error in found]


def seed_body(error: AstraiError) -> Mapping[str, Any]:
    """The seed's error body: a list of places for a refused request, a sentence otherwise."""
    if isinstance(error, errors.NotReady):
        return {"detail": "Engine not initialized"}  # the seed's exact words
    if wire(error).status == 400:
        place = (pointer(error.param) or "").split("/")[1:]
        return {"detail": [{"type": error.code, "loc": ["body", *place], "msg": error.message}]}
    return {"detail": error.message}


def seed_status(error: AstraiError) -> int:
    """The seed answers 422 where the public APIs answer 400."""
    status = wire(error).status
    return 422 if status == 400 else status
