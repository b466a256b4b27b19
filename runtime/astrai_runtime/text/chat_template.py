"""A conversation to one prompt, by the template that came with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2

from astrai_runtime.errors import InvalidRequest, WeightsError
from astrai_runtime.request import Message
from astrai_runtime.text import _budget as budget
from astrai_runtime.text._marks import ControlTexts, Marks
from astrai_runtime.text._sandbox import ChatEnvironment, plain
from astrai_runtime.text.tokenizer import Tokenizer

Tools = Sequence[Mapping[str, Any]]
_NONE: Mapping[str, str] = MappingProxyType({})
_RENDERING_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_COMPILE_ERRORS = (jinja2.TemplateError, RecursionError, SyntaxError, TypeError, ValueError)


class ChatTemplate:
    """One model's template, compiled. Renders like `transformers`; safe to use from several threads.

    Args:
        template: Jinja source.
        tokenizer: turns the rendered text into ids.
        variables: what the template sees besides the messages: `bos_token`, `eos_token`, ...

    Raises:
        WeightsError: the template is not valid Jinja, or uses a filter that does not exist.
    """

    def __init__(self, template: str, tokenizer: Tokenizer, *, variables: Mapping[str, str] = _NONE) -> None:
        self._tokenizer = tokenizer
        self._source = template
        self._controls = ControlTexts(tokenizer.special_tokens, tokenizer.swallows)
        self._variables = dict(variables)
        try:
            self._template = ChatEnvironment().from_string(template)
        except _COMPILE_ERRORS as error:
            line = getattr(error, "lineno", None)
            where = f" in line {line}" if line else ""
            raise WeightsError(f"the model's chat template is damaged{where}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        prefill: bool = False,
        tools: Tools | None = None,
    ) -> str:
        """The prompt as text.

        Args:
            add_generation_prompt: ends with the words that open the assistant's answer.
            prefill: the last message, the assistant's, is continued: the text ends with exactly its content, and
                `add_generation_prompt` has no effect.
            tools: what the assistant may call, in the form that the template expects; none is the same as None.

        Raises:
            InvalidRequest: the template refuses these messages; the message is the template's own.
        """
        given = [_as_dict(message) for message in messages]
        return self._render(given, _as_list(tools), add_generation_prompt=add_generation_prompt, prefill=prefill)

    def encode(self, messages: Sequence[Message], *, prefill: bool = False, tools: Tools | None = None) -> list[int]:
        """The prompt as token ids, ready for an answer.

        The template's control tokens become tokens; text in `messages` and `tools` that spells one, alone or together
        with its neighbours, stays text. There is exactly
        one BOS where the template writes one or the tokenizer's own rule adds one, and none otherwise.

        Raises:
            InvalidRequest: as `render`.
        """
        tokenizer = self._tokenizer
        given, offered = [_as_dict(message) for message in messages], _as_list(tools)
        marks = Marks(self._controls, given, self._source, offered or ())
        text = self._render(marks.hide_messages(given), marks.hide(offered), add_generation_prompt=True, prefill=prefill)
        if not marks.used:
            return tokenizer.encode(text, special=True, bos=tokenizer.add_bos)
        ids: list[int] = []
        for at, part in enumerate(marks.split(text)):
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += tokenizer.encode(part, bos=False) if at == 0 else tokenizer.encode_part(part)
        wants_bos = tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]
        return [tokenizer.bos_id, *ids] if wants_bos and tokenizer.bos_id is not None else ids

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, *, add_generation_prompt: bool, prefill: bool
    ) -> str:
        if not messages:
            raise InvalidRequest("a conversation needs at least one message")
        if not prefill:
            return self._run(messages, tools, add_generation_prompt)
        last = messages[-1]
        if last["role"] != "assistant":
            raise InvalidRequest(f"only an assistant's message can be continued, but the last one is the {last['role']}'s")
        cut = _unused_text(self._source, messages)
        before, found, _ = self._run([*messages[:-1], {**last, "content": cut}], tools, False).rpartition(cut)
        if not found:
            raise InvalidRequest(
                "this model's chat template does not show the last assistant message, so it cannot continue it"
            )
        return before + str(last["content"])

    def _run(self, messages: list[dict[str, Any]], tools: list[Any] | None, add_generation_prompt: bool) -> str:
        limit = budget.MAX_CHARS
        parts: list[str] = []
        try:
            for part in self._template.generate(
                **self._variables,
                **{budget.KEY: budget.Budget()},
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            ):
                parts.append(part)
                limit -= len(part)
                if limit < 0:
                    raise InvalidRequest(f"the chat template prints more than {budget.MAX_CHARS} characters")
        except _RENDERING_ERRORS as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}") from error
        return "".join(parts)


def template_of_folder(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template of a Hugging Face model folder: chat_template.jinja, else the default one in tokenizer_config.json.

    Raises:
        WeightsError: a file is damaged, or the template is.
    """
    from astrai_runtime.text._hf import read_json, special_texts

    settings = read_json(path / "tokenizer_config.json")
    file = path / "chat_template.jinja"
    if file.is_file():
        try:
            source: object = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WeightsError(f"{file} cannot be read: {error}") from error
    else:
        source = read_json(path / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise WeightsError(f"the chat_template of {path} must be text, not {type(source).__name__}")
    return ChatTemplate(source, tokenizer, variables=special_texts(settings))


def template_of_gguf(metadata: Mapping[str, Any], tokenizer: Tokenizer) -> ChatTemplate | None:
    """The template in a GGUF file's metadata (`tokenizer.chat_template`), if there is one.

    Raises:
        WeightsError: the template is damaged.
    """
    from astrai_runtime.text._gguf import special_texts

    source = metadata.get("tokenizer.chat_template")
    return None if source is None else ChatTemplate(str(source), tokenizer, variables=special_texts(metadata))


def _as_dict(message: Message) -> dict[str, Any]:
    try:
        extra = {key: plain(value) for key, value in message.extra.items() if value is not None}
    except (TypeError, RecursionError) as error:
        raise InvalidRequest(str(error)) from error
    return {**extra, "role": message.role, "content": message.content}


def _as_list(tools: Tools | None) -> list[Any] | None:
    try:
        return [plain(tool) for tool in tools] if tools else None
    except (TypeError, RecursionError) as error:
        raise InvalidRequest(str(error)) from error


def _unused_text(*places: object) -> str:
    """A text that occurs in none of `places` and that no template trims or splits."""
    seen = "".join(map(repr, places))
    number = 0
    while (text := f"continue-here-{number}") in seen:
        number += 1
    return text
