"""The contract of an agent: it turns what was said into a prompt. Runs in a worker thread, never on the engine's."""

from __future__ import annotations

from abc import ABC, abstractmethod

from astrai_runtime.request import Prompt, Turn


class Agent(ABC):
    @abstractmethod
    def prepare(self, turn: Turn) -> Prompt:
        """Assembles and tokenizes the prompt of one turn, and clamps its token limit to the context.

        Raises:
            InvalidRequest: the chat template refuses the messages; ContextLengthExceeded: they do not fit.
        """
