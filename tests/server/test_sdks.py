"""The official SDKs, sync and async, streaming and not, against a live service over each provider."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.live import serving

ROOT = Path(__file__).resolve().parent.parent.parent
KEY = "s3cret"
CONTEXT = 128
ASK: Any = {"model": "tiny", "messages": [{"role": "user", "content": "What is a bridge?"}], "max_tokens": 12}
GREEDY: Any = {"temperature": 0.0}
SAMPLED: Any = {"temperature": 1.0, "seed": 7}
NO_END: Any = {"ignore_eos": True}


CHOICES = (
    f"model.context={CONTEXT}",
    "protocols.openai.max_tokens=100",
    "protocols.anthropic.max_tokens=100",
    f"server.api_keys=[{KEY}]",
)


@contextmanager
def own_process(home: Path) -> Iterator[str]:
    """The service as people start it, with a random model; SIGTERM must end it well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ASTR", "HF_"))}
    environment |= {f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "STATE")}
    environment |= {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'runtime'}", "OMP_NUM_THREADS": "1"}
    log = home / "stderr"
    with log.open("w") as errors:
        command = [sys.executable, "-m", "astrai_deploy.cli", "serve", "+recipe=tiny", "server.port=0", *CHOICES]
        process = subprocess.Popen(command, cwd=home, env=environment, text=True, stdout=subprocess.PIPE, stderr=errors)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line.startswith("http://127.0.0.1:"), log.read_text()
        yield line
        process.terminate()
        assert process.wait(20) == 0, log.read_text()


@pytest.fixture(scope="module", params=["local", "mock", "remote"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a live service with an API key and a context of 128 tokens, once over each provider.

    `mock` strays from its script when it is sampled, so that seeds show; `remote` passes everything on to such a service.
    """
    mock = ("provider=mock", "provider.sharpness=1")
    with ExitStack() as services:
        match request.param:
            case "local":
                yield services.enter_context(own_process(tmp_path_factory.mktemp("home")))
            case "mock":
                yield services.enter_context(serving(*mock, *CHOICES))
            case _:
                far = services.enter_context(serving(*mock, *CHOICES))
                to = ("provider=remote", f"provider.url={far}/v1", f"provider.api_key={KEY}")
                yield services.enter_context(serving(*to, *CHOICES))


@pytest.fixture
def chat(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def messages(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


def test_openai_stream_equals_the_whole_answer(chat: openai.OpenAI) -> None:
    whole = chat.chat.completions.create(**ASK, **GREEDY)
    stream = chat.chat.completions.create(**ASK, **GREEDY, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    counts = [(told.prompt_tokens, told.completion_tokens, told.total_tokens) for told in (chunks[-1].usage, whole.usage)]
    assert counts[0] == counts[1]  # only cached_tokens differ: the second answer finds what the first one left
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert whole._request_id is not None


def test_openai_async_stream_equals_the_whole_answer(url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            whole = await client.chat.completions.create(**ASK, **GREEDY)
            text = ""
            async for chunk in await client.chat.completions.create(**ASK, **GREEDY, stream=True):
                text += chunk.choices[0].delta.content or ""
            assert text == whole.choices[0].message.content

    asyncio.run(run())


def test_openai_stream_helper_accumulates_the_answer(chat: openai.OpenAI) -> None:
    with chat.chat.completions.stream(**ASK, **GREEDY) as stream:
        for _ in stream:
            pass
        seen = stream.current_completion_snapshot
    assert seen.choices[0].message.content == chat.chat.completions.create(**ASK, **GREEDY).choices[0].message.content


def test_openai_stream_helper_sees_every_event_of_several_choices(chat: openai.OpenAI) -> None:
    with chat.chat.completions.stream(**ASK, **SAMPLED, n=2, logprobs=True, top_logprobs=2, extra_body=NO_END) as stream:
        said = [event.type for event in stream]
        final = stream.current_completion_snapshot  # get_final_completion refuses answers that a limit ended
    assert {"chunk", "content.delta", "content.done", "logprobs.content.delta", "logprobs.content.done"} <= set(said)
    assert said.count("content.done") == 2
    whole = chat.chat.completions.create(**ASK, **SAMPLED, n=2, logprobs=True, top_logprobs=2, extra_body=NO_END)
    assert [choice.message.content for choice in final.choices] == [choice.message.content for choice in whole.choices]
    assert [choice.logprobs for choice in final.choices] == [choice.logprobs for choice in whole.choices]


TEXT: Any = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12}


def test_openai_text_stream_equals_the_whole_answer(chat: openai.OpenAI) -> None:
    asked = {**TEXT, **SAMPLED, "n": 2, "echo": True, "extra_body": NO_END}
    whole = chat.completions.create(**asked)
    assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
    assert whole.choices[0].text.startswith("Once upon a time")
    texts = {0: "", 1: ""}
    *chunks, last = chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for chunk in chunks:
        assert (chunk.object, chunk.usage) == ("text_completion", None)
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == [choice.text for choice in whole.choices]
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 24
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_openai_text_prompts_may_be_ids_and_several(chat: openai.OpenAI) -> None:
    one, two = (chat.completions.create(**TEXT | {"prompt": text}, **GREEDY) for text in ("Once", "Twice"))
    for prompts in (["Once", "Twice"], [list(b"Once"), list(b"Twice")]):
        both = chat.completions.create(**TEXT | {"prompt": prompts}, **GREEDY)
        assert [choice.text for choice in both.choices] == [one.choices[0].text, two.choices[0].text]


def test_openai_text_logprobs_are_as_long_as_the_answer(chat: openai.OpenAI) -> None:
    logprobs = chat.completions.create(**TEXT, **GREEDY, logprobs=3, extra_body=NO_END).choices[0].logprobs
    assert logprobs is not None
    columns = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    assert [len(column or []) for column in columns] == [12] * 4


def test_openai_async_text_stream(url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            whole = await client.completions.create(**TEXT, **GREEDY)
            text = ""
            async for chunk in await client.completions.create(**TEXT, **GREEDY, stream=True):
                text += chunk.choices[0].text
            assert text == whole.choices[0].text

    asyncio.run(run())


def test_what_the_cache_gave_is_in_both_sdks_usage(chat: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    said: Any = {"messages": [{"role": "user", "content": "a beginning that is longer than two pages"}]}
    asked = ASK | said | {"max_tokens": 1}
    chat.chat.completions.create(**asked)
    usage = chat.chat.completions.create(**asked).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens
    told = messages.messages.create(**asked, extra_body={"cache_control": {"type": "ephemeral"}}).usage
    assert told.cache_read_input_tokens == usage.prompt_tokens_details.cached_tokens
    assert told.input_tokens + told.cache_read_input_tokens == usage.prompt_tokens


def test_choices_differ_under_a_seed_and_repeat_with_it(chat: openai.OpenAI) -> None:
    def ask(**more: Any) -> openai.types.chat.ChatCompletion:
        return chat.chat.completions.create(**ASK, n=3, extra_body=NO_END, **more)

    first, again = ask(**SAMPLED), ask(**SAMPLED)
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in again.choices]
    assert first.usage is not None
    assert first.usage.completion_tokens == 36
    alone = chat.chat.completions.create(**ASK, **SAMPLED, extra_body=NO_END)
    assert alone.usage is not None
    assert alone.usage.prompt_tokens == first.usage.prompt_tokens
    assert alone.choices[0].message.content == texts[0]
    streamed = {0: "", 1: "", 2: ""}
    for chunk in chat.chat.completions.create(**ASK, **SAMPLED, n=3, extra_body=NO_END, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert list(streamed.values()) == texts
    assert len({choice.message.content for choice in ask(**GREEDY).choices}) == 1


def test_logprobs_have_one_entry_for_each_token(chat: openai.OpenAI) -> None:
    answer = chat.chat.completions.create(**ASK, **GREEDY, logprobs=True, top_logprobs=3, extra_body=NO_END)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 12
    for entry in logprobs.content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0]  # greedy


@pytest.mark.parametrize("n", [1, 2])
def test_small_token_limits_are_exact(chat: openai.OpenAI, n: int) -> None:
    answer = chat.chat.completions.create(**ASK | {"max_tokens": n}, **GREEDY, extra_body=NO_END)
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (n, "length")


def test_stop_string_ends_the_answer_and_is_not_sent(
    chat: openai.OpenAI, messages: anthropic.Anthropic, request: pytest.FixtureRequest
) -> None:
    whole = chat.chat.completions.create(**ASK, **GREEDY).choices[0].message.content
    printable = re.search("[!-~]+", whole or "")  # the random model also makes bytes that are no text
    assert whole
    assert printable
    stop = printable[0][:2]
    cut = chat.chat.completions.create(**ASK, **GREEDY, stop=stop).choices[0]
    assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    if request.node.callspec.params["url"] == "remote":
        return  # the API in between says that a stop string ended it, not which one
    said = messages.messages.create(**ASK, stop_sequences=[stop], extra_body=GREEDY)
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)


def test_prompt_and_answer_share_the_context(chat: openai.OpenAI) -> None:
    def ask(content: str, **more: Any) -> openai.types.CompletionUsage:
        said: Any = [{"role": "user", "content": content}]
        usage = chat.chat.completions.create(model="tiny", messages=said, extra_body=NO_END, **more).usage
        assert usage is not None
        return usage

    overhead = ask("", max_tokens=1).prompt_tokens
    room = CONTEXT - overhead
    clamped = ask("x" * (room - 5))
    assert (clamped.prompt_tokens, clamped.completion_tokens) == (CONTEXT - 5, 5)
    assert ask("x" * (room - 5), max_tokens=5).completion_tokens == 5
    for content, more in (("x" * (room - 5), {"max_tokens": 6}), ("x" * room, {}), ("x" * 5000, {})):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(content, **more)
        assert (caught.value.code, caught.value.type) == ("context_length_exceeded", "invalid_request_error")
        assert str(CONTEXT) in caught.value.message


def test_openai_errors_have_their_classes(url: str, chat: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'") as caught:
        chat.chat.completions.create(**ASK, extra_body={"temprature": 1})
    assert (caught.value.param, caught.value.code) == ("/temprature", "unknown_parameter")
    with pytest.raises(openai.NotFoundError, match="serves: tiny"):
        chat.chat.completions.create(**ASK | {"model": "gpt-4o"})
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(**ASK)


def test_models_are_listed_for_both_sdks(chat: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    assert [model.id for model in chat.models.list()] == ["tiny"]
    assert chat.models.retrieve("tiny").object == "model"
    assert [model.id for model in messages.models.list()] == ["tiny"]
    assert messages.models.retrieve("tiny").created_at.year >= 2024


def test_anthropic_stream_equals_the_whole_answer(messages: anthropic.Anthropic) -> None:
    whole = messages.messages.create(**ASK, system="Be brief.", extra_body=GREEDY)
    with messages.messages.stream(**ASK, system="Be brief.", extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert final.content[0].type == "text"
    assert text == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert final.usage.input_tokens == whole.usage.input_tokens > 0
    names = [event.type for event in messages.messages.create(**ASK, extra_body=GREEDY, stream=True)]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_anthropic_async_stream_equals_the_whole_answer(url: str) -> None:
    async def run() -> None:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:
            whole = await client.messages.create(**ASK, extra_body=GREEDY)
            async with client.messages.stream(**ASK, extra_body=GREEDY) as stream:
                final = await stream.get_final_message()
            assert final.content[0].type == whole.content[0].type == "text"
            assert final.content[0].text == whole.content[0].text

    asyncio.run(run())


def test_anthropic_counts_tokens_without_generating(url: str, messages: anthropic.Anthropic) -> None:
    asked: Any = {"model": "tiny", "messages": ASK["messages"], "system": [{"type": "text", "text": "Be brief."}]}
    counted = messages.messages.count_tokens(**asked).input_tokens
    assert counted == messages.messages.create(**asked, max_tokens=1).usage.input_tokens

    async def run() -> int:
        async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client:
            return (await client.messages.count_tokens(**asked)).input_tokens

    assert asyncio.run(run()) == counted


def test_anthropic_stream_helper_sees_every_event(messages: anthropic.Anthropic) -> None:
    with messages.messages.stream(**ASK, extra_body=GREEDY) as stream:
        said = [event.type for event in stream]
        assert stream.request_id is not None
    assert said[0] == "message_start"
    assert {"content_block_start", "text", "content_block_delta", "content_block_stop", "message_delta"} <= set(said)
    assert said[-1] == "message_stop"


def test_anthropic_errors_have_their_classes(messages: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tools"):
        messages.messages.create(**ASK, tools=[{"name": "f", "input_schema": {"type": "object"}}])
    with pytest.raises(anthropic.NotFoundError) as caught:
        messages.messages.create(**ASK | {"model": "claude"})
    assert caught.value.body["request_id"] == caught.value.request_id  # type: ignore[index]  # the SDK calls it object


def test_string_and_text_parts_are_one_prompt(chat: openai.OpenAI, messages: anthropic.Anthropic) -> None:
    parts: Any = [{"type": "text", "text": "What is "}, {"type": "text", "text": "a bridge?"}]
    asked = ASK | {"messages": [{"role": "user", "content": parts}]}
    one, two = (chat.chat.completions.create(**body, **GREEDY) for body in (ASK, asked))
    assert one.usage == two.usage
    assert one.choices[0].message == two.choices[0].message
    assert messages.messages.create(**asked, extra_body=GREEDY).usage.input_tokens == (
        messages.messages.create(**ASK, extra_body=GREEDY).usage.input_tokens
    )


def test_replayed_tool_call_renders_alike_without_content(chat: openai.OpenAI) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    counts = set()
    for content in ({"content": None}, {}, {"content": ""}):
        replayed: Any = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "tool_calls": calls, **content},
            {"role": "tool", "tool_call_id": "c1", "content": "42"},
        ]
        usage = chat.chat.completions.create(model="tiny", messages=replayed, max_tokens=1).usage
        assert usage is not None
        counts.add(usage.prompt_tokens)
    assert len(counts) == 1


def test_many_clients_at_once_get_the_answer_of_one(url: str) -> None:
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
            alone = await client.chat.completions.create(**ASK, **GREEDY)
            together = await asyncio.gather(*(client.chat.completions.create(**ASK, **GREEDY) for _ in range(6)))
            assert {answer.choices[0].message.content for answer in together} == {alone.choices[0].message.content}

    asyncio.run(run())


def test_nothing_runs_once_everyone_is_answered(url: str) -> None:
    stats = httpx.get(f"{url}/stats", headers={"x-api-key": KEY}).json()
    assert (stats["active_tasks"], stats["waiting_queue"]) == (0, 0)
    assert set(stats) >= {"total_tasks", "total_tokens", "active_tasks", "waiting_queue"}
