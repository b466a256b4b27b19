"""The contract of an agent: it turns what was said into a prompt. Runs in a worker thread, never on the engine's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from astrai_runtime.request import Prompt, Turn


class Agent(ABC):
    @abstractmethod
    def prepare(self, turn: Turn) -> Prompt:
        """Assembles and tokenizes the prompt of one turn, and clamps its token limit to the context.

        Raises:
            InvalidRequest: the chat template refuses the messages; ContextLengthExceeded: they do not fit.
        """

    @abstractmethod
    def encode(self, turn: Turn) -> tuple[int, ...]:
        """The token ids of one turn's prompt, as `prepare` makes them, however many they are.

        Raises:
            InvalidRequest: the chat template refuses the messages.
        """

    @abstractmethod
    def spell(self, token_ids: Iterable[int]) -> list[bytes]:
        """The exact bytes of each token; nothing for control tokens.

        Raises:
            InvalidRequest: no such token.
        """
