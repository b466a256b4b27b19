"""An agent without memory: each turn stands for itself, and everything it says comes from the request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from astrai_runtime.agents.base import Agent
from astrai_runtime.attention._select import required_backend
from astrai_runtime.errors import ContextLengthExceeded, InvalidRequest
from astrai_runtime.request import Limits, Prompt, Turn
from astrai_runtime.text.chat_template import ChatTemplate
from astrai_runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """What a model card says about chat answers: strings that end one, and whether one leading space is dropped."""

    stop: Sequence[str] = ()
    trim_leading_space: bool = False


class StatelessAgent(Agent):
    """Renders and tokenizes. Safe to use from several threads.

    Args:
        tokenizer: of the model.
        chat_template: None for a model that only completes text.
        chat: applies to messages, not to raw text.
        context: tokens of one sequence, prompt and answer.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, chat: ChatStyle, context: int) -> None:
        self._tokenizer = tokenizer
        self._template = chat_template
        self._chat = chat
        self._context = context

    def prepare(self, turn: Turn) -> Prompt:
        ids = self.encode(turn)
        if not ids:
            place = "/messages" if turn.messages else "/prompt"
            raise InvalidRequest("the prompt is empty, and this model has no mark to begin with; say something", param=place)
        if turn.text is not None or turn.token_ids is not None:
            stop, trim = turn.limits.stop, False
        else:
            # A continued answer begins in the middle of a line: its first space is the model's own.
            stop, trim = turn.limits.stop + tuple(self._chat.stop), self._chat.trim_leading_space and not turn.prefill
        return Prompt(
            token_ids=ids,
            sampling=turn.sampling,
            limits=self._clamped(replace(turn.limits, stop=tuple(dict.fromkeys(stop))), len(ids)),
            top_logprobs=turn.top_logprobs,
            trim_leading_space=trim,
            backend=required_backend(),
            cache_salt=turn.cache_salt,
        )

    def encode(self, turn: Turn) -> tuple[int, ...]:
        if turn.token_ids is not None:
            return turn.token_ids
        if turn.text is not None:
            return tuple(self._tokenizer.encode(turn.text))
        if self._template is None:
            raise InvalidRequest("this model has no chat template; send raw text, or set model.chat.template")
        return tuple(self._template.encode(turn.messages, prefill=turn.prefill))

    def spell(self, token_ids: Iterable[int]) -> list[bytes]:
        return [self._tokenizer.token_bytes(token) for token in token_ids]

    def _clamped(self, limits: Limits, n_prompt: int) -> Limits:
        """What was asked for must fit as it stands; what nobody asked for is lowered to the room that is left."""
        asked = limits.max_tokens
        if n_prompt + (asked or 1) > self._context:
            raise ContextLengthExceeded(n_prompt + (asked or 1), self._context)
        if asked is not None:
            return limits
        room = self._context - n_prompt
        return replace(limits, max_tokens=min(limits.default_max_tokens or room, room))
