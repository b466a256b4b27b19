"""The tree of errors: codes for programs, messages for people."""

from __future__ import annotations

import inspect

from astrai_runtime import errors
from astrai_runtime.errors import AstraiError, Busy, ContextLengthExceeded, InvalidRequest, NotReady, did_you_mean

ALL = [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, AstraiError)]


def test_every_error_has_a_code_of_its_own() -> None:
    codes = [error.code for error in ALL]
    assert len(set(codes)) == len(codes)
    assert all(code == code.lower() and " " not in code for code in codes)


def test_the_tree_in_the_documentation_names_every_error() -> None:
    for error in ALL:
        assert error.__name__ in errors.__doc__


def test_too_long_requests_carry_both_numbers() -> None:
    error = ContextLengthExceeded(120, 100, param="/messages")
    assert isinstance(error, InvalidRequest)
    assert (error.needed, error.limit, error.param) == (120, 100, "/messages")
    assert "120" in error.message
    assert "100" in error.message


def test_not_ready_is_a_kind_of_busy_with_a_time_to_retry() -> None:
    assert issubclass(NotReady, Busy)
    assert NotReady("loading", retry_after_s=5.0).retry_after_s == 5.0


def test_guess_is_made_only_when_a_name_is_near() -> None:
    assert did_you_mean("pagd", ["paged", "contiguous"]) == "; did you mean 'paged'?"
    assert did_you_mean("xyz", ["paged"]) == ""
