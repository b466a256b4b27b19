"""What is measured, as data: works in groups, each group one uninterrupted measurement of one side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

BATCHES = (1, 4, 8, 16)
CONTEXTS = (0, 512)
PREFIXES = ("none", "shared", "unique")
PROMPT = 512  # tokens
SHORT = 8  # tokens of a prompt that stands for no context
KINDS = ("prefill", "decode", "busy", "http", "start")
Kind = Literal["prefill", "decode", "busy", "http", "start"]

# Numbers of which less is better; of all others more is.
LESS = frozenset(
    {
        "ttft_ms",
        "p50_ms",
        "p95_ms",
        "first_s",
        "second_s",
        "first_peak_mib",
        "peak_mib",
        "busy_p95_ms",
        "idle_p95_ms",
        "slowdown",
    }
)


@dataclass(frozen=True)
class Work:
    """One measurement. `streams`: sequences or clients at once; `context`: tokens before the first decoded one."""

    kind: Kind
    streams: int = 1
    context: int = 0
    prefix: str = "none"

    @property
    def key(self) -> str:
        return {
            "prefill": f"prefill {PROMPT}",
            "decode": f"decode x{self.streams} @{self.context}",
            "busy": f"busy x{self.streams}",
            "http": f"http x{self.streams} {self.prefix}",
            "start": "start",
        }[self.kind]

    def prompts(self, salt: int = 0) -> list[list[int]]:
        """The same ids for every side; another salt gives others, so that no cache of prefixes helps."""
        length = PROMPT if self.kind == "prefill" else max(self.context, SHORT)
        return [prompt_ids(length, 1000 * salt + i) for i in range(self.streams)]


def prompt_ids(length: int, salt: int, vocabulary: int = 250) -> list[int]:
    """Ids that every tokenizer has, down to one of bytes."""
    return [3 + (salt * 7919 + i * (31 + salt % 7)) % (vocabulary - 3) for i in range(length)]


def engine_groups(kinds: Sequence[str], batches: Sequence[int], contexts: Sequence[int]) -> list[list[Work]]:
    """Prefill belongs to the group of the long context, because llama.cpp's tool measures both in one run."""
    groups = []
    for context in contexts:
        group = [Work("prefill")] if "prefill" in kinds and context == max(contexts) else []
        if "decode" in kinds:
            group += [Work("decode", streams, context) for streams in batches]
        groups.append(group)
    groups.append([Work("busy", 8)] if "busy" in kinds else [])
    return [group for group in groups if group]


def http_groups(clients: Sequence[int], prefixes: Sequence[str]) -> list[list[Work]]:
    return [[Work("http", streams, prefix=prefix)] for prefix in prefixes for streams in clients]


def only(groups: list[list[Work]], wanted: Callable[[Work], bool]) -> list[list[Work]]:
    """The groups without the works that are not wanted, and without those that are empty then."""
    return [kept for group in groups if (kept := [work for work in group if wanted(work)])]
