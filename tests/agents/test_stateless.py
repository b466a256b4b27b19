"""A turn becomes a prompt: templates, raw text, stop strings, and limits that are clamped or refused."""

from __future__ import annotations

import pytest

from astrai_runtime.agents._stateless import ChatStyle, StatelessAgent
from astrai_runtime.attention._select import attn_backend
from astrai_runtime.errors import ContextLengthExceeded, InvalidRequest
from astrai_runtime.request import Limits, Message, SamplingParams, Turn
from astrai_runtime.text._bytes import byte_tokenizer
from astrai_runtime.text.chat_template import ChatTemplate

TEMPLATE = (
    "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TOKENIZER = byte_tokenizer()
SAMPLING = SamplingParams(temperature=0.5)


def agent(context: int = 100, **chat: object) -> StatelessAgent:
    return StatelessAgent(TOKENIZER, ChatTemplate(TEMPLATE, TOKENIZER), ChatStyle(**chat), context)


def chat(*texts: str, limits: Limits | None = None, **fields: object) -> Turn:
    roles = ("user", "assistant")
    messages = tuple(Message(roles[i % 2], text) for i, text in enumerate(texts))
    return Turn(SAMPLING, limits or Limits(), messages=messages, **fields)


def test_messages_go_through_the_template() -> None:
    prompt = agent().prepare(chat("hi", "yes", "bye", top_logprobs=3))
    assert TOKENIZER.decode(prompt.token_ids) == "u:hi;a:yes;u:bye;a:"
    assert (prompt.sampling, prompt.top_logprobs) == (SAMPLING, 3)


def test_last_answer_is_continued_with_prefill() -> None:
    prompt = agent(trim_leading_space=True).prepare(chat("hi", "The answer", prefill=True))
    assert TOKENIZER.decode(prompt.token_ids).endswith("The answer")
    assert not prompt.trim_leading_space


def test_stop_strings_are_the_requests_and_the_cards() -> None:
    style = {"stop": ("\nUser:", "END"), "trim_leading_space": True}
    prompt = agent(**style).prepare(chat("hi", limits=Limits(stop=("END", "x"))))
    assert prompt.limits.stop == ("END", "x", "\nUser:")
    assert prompt.trim_leading_space


def test_raw_text_is_left_alone_by_the_card() -> None:
    turn = Turn(SAMPLING, Limits(stop=("x",)), text="once")
    prompt = agent(stop=("\nUser:",), trim_leading_space=True).prepare(turn)
    assert prompt.token_ids == tuple(TOKENIZER.encode("once"))
    assert (prompt.limits.stop, prompt.trim_leading_space) == (("x",), False)


def test_token_limit_that_nobody_asked_for_is_clamped_to_the_room() -> None:
    used = len(TOKENIZER.encode("x" * 90))
    room = 100 - used
    for default, granted in ((None, room), (5, 5), (4096, room)):
        turn = Turn(SAMPLING, Limits(default_max_tokens=default), text="x" * 90)
        assert agent().prepare(turn).limits.max_tokens == granted


def test_token_limit_that_was_asked_for_fits_or_is_refused_with_both_numbers() -> None:
    used = len(TOKENIZER.encode("x" * 90))
    turn = Turn(SAMPLING, Limits(max_tokens=100 - used), text="x" * 90)
    assert agent().prepare(turn).limits.max_tokens == 100 - used
    with pytest.raises(ContextLengthExceeded) as caught:
        agent().prepare(Turn(SAMPLING, Limits(max_tokens=101 - used), text="x" * 90))
    assert (caught.value.needed, caught.value.limit) == (101, 100)


def test_prompt_without_room_for_one_token_is_refused() -> None:
    used = len(TOKENIZER.encode("x" * 90))
    turn = Turn(SAMPLING, Limits(), text="x" * 90)
    assert agent(context=used + 1).prepare(turn).limits.max_tokens == 1
    with pytest.raises(ContextLengthExceeded):
        agent(context=used).prepare(turn)


def test_model_without_a_template_refuses_chat_and_completes_text() -> None:
    bare = StatelessAgent(TOKENIZER, None, ChatStyle(), 100)
    with pytest.raises(InvalidRequest, match="no chat template"):
        bare.prepare(chat("hi"))
    assert bare.prepare(Turn(SAMPLING, Limits(), text="hi")).token_ids


def test_surrounding_backend_is_carried_with_the_prompt() -> None:
    with attn_backend("torch_native"):
        assert agent().prepare(chat("hi")).backend == "torch_native"
    assert agent().prepare(chat("hi")).backend is None


def test_token_ids_are_a_prompt_as_they_are() -> None:
    turn = Turn(SAMPLING, Limits(stop=("x",)), token_ids=(72, 105), cache_salt="mine")
    prompt = agent(stop=("\nUser:",), trim_leading_space=True).prepare(turn)
    assert (prompt.token_ids, prompt.cache_salt) == ((72, 105), "mine")
    assert (prompt.limits.stop, prompt.trim_leading_space) == (("x",), False)


def test_empty_text_is_refused_where_no_mark_begins_a_sequence() -> None:
    with pytest.raises(InvalidRequest, match="the prompt is empty") as caught:
        agent().prepare(Turn(SAMPLING, Limits(), text=""))
    assert caught.value.param == "/prompt"


def test_tokens_are_counted_however_many_they_are() -> None:
    turn = chat("x" * 500)
    assert agent().encode(turn) == tuple(TOKENIZER.encode(f"u:{'x' * 500};a:"))
    with pytest.raises(ContextLengthExceeded):
        agent().prepare(turn)


def test_tokens_are_spelled_byte_by_byte() -> None:
    assert agent().spell([72, 0xF0, 257]) == [b"H", b"\xf0", b""]
    with pytest.raises(InvalidRequest, match="out of range"):
        agent().spell([258])
