"""The quality table on a tiny model: the native formats are compared with float32 token by token."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from bench import quality

STORY = "the lantern on the bridge is lit in the evening and the keeper walks along the river until morning. "


@pytest.fixture
def scores(home: Path, tiny_checkpoints: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, quality.Score]:
    from astrai_runtime.errors import KernelError

    monkeypatch.setattr(quality, "WINDOW", 32)
    monkeypatch.setattr(quality, "STEP", 12)  # no divisor of the window
    try:
        with torch.inference_mode():
            return quality.measure(tiny_checkpoints["llama"], STORY * 9, None, 1, 3)
    except KernelError as error:
        pytest.skip(str(error))


def test_formats_are_scored_against_float32(scores: dict[str, quality.Score]) -> None:
    base = scores["float32, torch"]
    assert list(scores) == ["float32, torch", *(variant.name for variant in quality.VARIANTS)]
    assert {score.n for score in scores.values()} == {3 * 31}  # the first token of a window is not guessed
    assert base.divergence == 0
    assert base.agreed == base.n
    assert abs(scores["float32"].perplexity / base.perplexity - 1) < 1e-4
    worse = [scores[name].divergence for name in ("float32", "bfloat16", "int8", "int4, all layers")]
    assert worse == sorted(worse)
    assert 0 < scores["int8"].divergence / base.n < 0.01
    held = [scores[name].n_bytes for name in ("float32", "bfloat16", "int8", "int4, all layers")]
    assert held == sorted(held, reverse=True)


def test_table_has_a_line_for_each_format(scores: dict[str, quality.Score]) -> None:
    lines = quality.table(scores).splitlines()
    assert len(lines) == 2 + len(scores)
    assert {line.count("|") for line in lines} == {7}
    assert "| +0.00 % | 0.00000 | 100.00 % |" in lines[2]


def test_text_is_there() -> None:
    text = quality.TEXT.read_text(encoding="utf-8")
    assert 20_000 < len(text) < 40_000
