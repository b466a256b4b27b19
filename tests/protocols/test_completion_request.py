"""What the text completion route makes of a body: one turn for each prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from astrai_runtime.errors import InvalidRequest, UnknownField, Unsupported
from astrai_runtime.request import Turn


@pytest.fixture
def read(speak: Callable[..., Any]) -> Callable[..., Sequence[Turn]]:
    speaker = speak("openai", "openai", route=1)
    return lambda **fields: speaker.read_all({"prompt": "Once"} | fields)


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("Once", ["Once"], [None]),
        ("", [""], [None]),
        (["Once", "Twice"], ["Once", "Twice"], [None, None]),
        ([1, 2, 3], [None], [(1, 2, 3)]),
        ([[1, 2], [3]], [None, None], [(1, 2), (3,)]),
    ],
)
def test_each_prompt_is_a_turn(read: Callable[..., Sequence[Turn]], prompt: Any, texts: Any, ids: Any) -> None:
    turns = read(prompt=prompt)
    assert [turn.text for turn in turns] == texts
    assert [turn.token_ids for turn in turns] == ids
    assert all(turn.messages == () for turn in turns)


@pytest.mark.parametrize("prompt", [None, [], [[]], [None], ["a", 1], [1, "a"], [[1], "a"], [True], [-1], [1.5], {}, 3])
def test_what_is_no_prompt_is_no_request(read: Callable[..., Sequence[Turn]], prompt: Any) -> None:
    with pytest.raises(ValidationError):
        read(prompt=prompt)


def test_token_that_does_not_exist_is_refused_with_its_prompts_place(read: Callable[..., Sequence[Turn]]) -> None:
    for prompt, place in (([1, 259], "/prompt"), ([[1], [259]], "/prompt/1")):
        with pytest.raises(InvalidRequest, match="token 259 does not exist") as caught:
            read(prompt=prompt)
        assert caught.value.param == place


def test_answers_are_short_unless_the_request_says_otherwise(read: Callable[..., Sequence[Turn]]) -> None:
    (turn,) = read()
    assert (turn.limits.max_tokens, turn.limits.default_max_tokens) == (None, 16)
    (turn,) = read(max_tokens=500, logprobs=0, echo=False, best_of=2, n=2, cache_salt="mine", stop="x", stream=True)
    assert (turn.limits.max_tokens, turn.limits.stop, turn.n, turn.stream) == (500, ("x",), 2, True)
    assert (turn.top_logprobs, turn.echo, turn.cache_salt) == (0, False, "mine")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"suffix": "end"}, "/suffix"),
        ({"best_of": 3}, "/best_of"),
        ({"best_of": 1, "n": 2}, "/best_of"),
        ({"echo": True, "logprobs": 0}, "/logprobs"),
    ],
)
def test_field_that_cannot_be_honoured_is_named(
    read: Callable[..., Sequence[Turn]], fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(Unsupported, match="not supported by this deployment") as caught:
        read(**fields)
    assert caught.value.param == named


def test_choices_of_all_prompts_are_bounded_together(read: Callable[..., Sequence[Turn]]) -> None:
    assert len(read(prompt=["x"] * 4, n=2)) == 4
    for fields in ({"prompt": ["x"] * 9}, {"prompt": ["x"] * 5, "n": 2}, {"n": 9}):
        with pytest.raises(InvalidRequest, match="8"):
            read(**fields)


def test_chat_fields_are_unknown_here(read: Callable[..., Sequence[Turn]]) -> None:
    for name in ("messages", "tools", "max_completion_tokens", "top_logprobs"):
        with pytest.raises(UnknownField, match=name):
            read(**{name: 1})
