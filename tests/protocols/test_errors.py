"""The table from errors to the wire, written out: a new error has no place in it until somebody decides."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from astrai_runtime import errors
from astrai_runtime.errors import AstraiError
from astrai_runtime.protocols import _errors

INVALID = "invalid_request_error"
EXPECTED: dict[str, tuple[int, str, str]] = {
    # what a request can do about itself
    "InvalidRequest": (400, INVALID, INVALID),
    "UnknownField": (400, INVALID, INVALID),
    "ContextLengthExceeded": (400, INVALID, INVALID),
    "Unsupported": (400, INVALID, INVALID),
    "BackendRefused": (400, INVALID, INVALID),
    "Unauthorized": (401, INVALID, "authentication_error"),
    "Forbidden": (403, INVALID, "permission_error"),
    "NotFound": (404, INVALID, "not_found_error"),
    "ModelNotFound": (404, INVALID, "not_found_error"),
    "WrongState": (409, INVALID, INVALID),
    "CapacityExceeded": (413, INVALID, "request_too_large"),
    "RateLimited": (429, "rate_limit_error", "rate_limit_error"),
    # what time helps against
    "Busy": (503, "server_error", "overloaded_error"),
    "NotReady": (503, "server_error", "overloaded_error"),
    "Cancelled": (503, "server_error", "api_error"),
    "DeadlineExpired": (504, "server_error", "timeout_error"),
    # what only the operator can mend; no request leads to the first five
    "AstraiError": (500, "server_error", "api_error"),
    "UnknownPart": (500, "server_error", "api_error"),
    "WeightsError": (500, "server_error", "api_error"),
    "KernelError": (500, "server_error", "api_error"),
    "SourceError": (500, "server_error", "api_error"),
    "ProviderError": (500, "server_error", "api_error"),
    "UpstreamError": (502, "server_error", "api_error"),
    "UpstreamTimeout": (504, "server_error", "timeout_error"),
}
CLASSES = {name: one for name, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, AstraiError)}
MADE: dict[str, tuple[Any, ...]] = {"UnknownPart": ("kv", "pagd", ["paged"]), "ContextLengthExceeded": (70, 64)}


def test_every_error_is_in_the_table_and_nothing_else() -> None:
    assert set(CLASSES) == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_status_and_names_are_the_declared_ones(speak: Callable[..., Any], name: str) -> None:
    status, to_openai, to_anthropic = EXPECTED[name]
    error = CLASSES[name](*MADE.get(name, ("what went wrong",)))
    public, other = (speak(kind, kind).protocol.error(error) for kind in ("openai", "anthropic"))
    assert (public.status, other.status) == (status, status)
    assert public.body["error"]["type"] == to_openai
    assert public.body["error"]["code"] == error.code
    assert other.body["error"]["type"] == to_anthropic
    assert speak("openai", "astrai").protocol.error(error).status == (422 if status == 400 else status)


def test_subclass_of_tomorrow_takes_its_parents_row() -> None:
    class Stranger(errors.ModelNotFound):
        code = "stranger"

    assert _errors.wire(Stranger("who?")) == _errors.TABLE[errors.NotFound]


def test_anthropic_error_is_signed_with_the_requests_id(speak: Callable[..., Any]) -> None:
    for kind, dialect, signed in (
        ("anthropic", "anthropic", True),
        ("anthropic", "astrai", False),
        ("openai", "openai", False),
    ):
        protocol = speak(kind, dialect).protocol
        reply = protocol.signed(protocol.error(errors.NotFound("nothing here")), "req_7")
        assert reply.body.get("request_id") == ("req_7" if signed else None)
