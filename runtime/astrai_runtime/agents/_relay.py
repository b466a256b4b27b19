"""An agent that renders nothing: the turn goes to the service that answers it, and is counted where that service counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from astrai_runtime.agents.base import Agent
from astrai_runtime.errors import ContextLengthExceeded, InvalidRequest, Unsupported
from astrai_runtime.provider.base import TextProvider
from astrai_runtime.request import Limits, Prompt, Turn


class RelayAgent(Agent):
    """Passes turns on. Safe to use from several threads; waits for the service where it tokenizes.

    Limits are checked as far as they are known: against the context when the service said how large it is, with the
    prompt's tokens when it counts them. What cannot be known here the service refuses itself.
    """

    def __init__(self, provider: TextProvider) -> None:
        self._provider = provider

    def prepare(self, turn: Turn) -> Prompt:
        if turn.text is None and turn.token_ids is None and not turn.messages:
            raise InvalidRequest("a conversation needs at least one message", param="/messages")
        ids = self._counted(turn)
        if turn.token_ids == () or ids == ():
            raise InvalidRequest("the prompt is empty: it needs at least one token")
        limits = self._clamped(turn.limits, 0 if ids is None else len(ids))
        return Prompt(ids or (), turn.sampling, limits, top_logprobs=turn.top_logprobs, turn=turn)

    def encode(self, turn: Turn) -> tuple[int, ...]:
        ids = self._counted(turn)
        if ids is None:
            raise Unsupported("this deployment's model answers elsewhere, and that service does not tokenize for others")
        return ids

    def spell(self, token_ids: Iterable[int]) -> list[bytes]:
        raise Unsupported("this deployment's model answers elsewhere, and that service does not spell tokens for others")

    def _counted(self, turn: Turn) -> tuple[int, ...] | None:
        """The prompt's tokens, where the service tells them."""
        if turn.prefill:
            raise Unsupported("this deployment's model answers elsewhere, where an assistant's message cannot be continued")
        return None if self._provider.tokenize is None else self._provider.tokenize(turn)

    def _clamped(self, limits: Limits, n_prompt: int) -> Limits:
        """As `StatelessAgent` does it where the context is known; where it is not, the service has the last word."""
        context, asked = self._provider.info.context, limits.max_tokens
        if context and n_prompt + (asked or 1) > context:
            raise ContextLengthExceeded(n_prompt + (asked or 1), context)
        if asked is not None:
            return limits
        room = context - n_prompt if context else limits.default_max_tokens
        return replace(limits, max_tokens=min(filter(None, (limits.default_max_tokens, room)), default=None))
