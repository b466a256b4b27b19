"""The native backend's own rules: what it can serve, the storage in whole blocks, and that it has no op-by-op form."""

from __future__ import annotations

import pytest
import torch

from astrai_runtime.attention.base import AttentionShape
from astrai_runtime.attention.cpu import Cpu
from astrai_runtime.errors import BackendRefused
from astrai_runtime.kv.base import KVShape
from astrai_runtime.machine import Machine

LAPTOP = Machine("laptop", "cpu", 8 << 30, 2, software=frozenset({"cxx"}))
PLAIN = AttentionShape(8, 2, 64, "bfloat16", (None, 512), 16)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [None, 1, 16, 4096])
def test_every_usual_shape_can_be_served(head_dim: int, dtype: str, page_size: int | None) -> None:
    shape = AttentionShape(8, 2, head_dim, dtype, (None, 512), page_size)
    assert Cpu.refuses(LAPTOP, shape, "prefill") is None
    assert Cpu.refuses(LAPTOP, shape, "decode") is None


@pytest.mark.parametrize(
    ("machine", "shape", "words"),
    [
        (Machine("h", "cuda", 8 << 30, 2, software=frozenset({"cxx"})), PLAIN, "device is cuda"),
        (Machine("b", "cpu", 8 << 30, 2), PLAIN, "no C++ compiler"),
        (LAPTOP, AttentionShape(8, 2, 64, "float16"), "float16"),
        (LAPTOP, AttentionShape(8, 2, 64, "float32", softcap=30.0), "soft cap"),
        (LAPTOP, AttentionShape(7, 2, 64, "float32"), "7 query heads"),
        (LAPTOP, AttentionShape(8, 2, 72, "float32"), "72 features"),
        (LAPTOP, AttentionShape(8, 2, 288, "float32"), "288 features"),
        (LAPTOP, AttentionShape(8, 2, 64, "float32", rotated=32), "32 of 64"),
    ],
)
def test_what_it_cannot_serve_is_said(machine: Machine, shape: AttentionShape, words: str) -> None:
    reason = Cpu.refuses(machine, shape, "decode")
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize("n_tokens", [1, 15, 16, 33])
def test_storage_is_whole_blocks_seen_as_token_slots(n_tokens: int) -> None:
    k, v = Cpu().allocate(KVShape(3, 2, 16, "bfloat16", 2, 10, n_tokens), "cpu")
    whole = -(-n_tokens // 16) * 16

    assert k.shape == v.shape == (3, n_tokens, 2, 16)
    assert k.stride(0) == v.stride(0) == whole * 2 * 16  # the next layer begins after the last whole block
    assert k.untyped_storage().nbytes() == 3 * whole * 2 * 16 * 2


def test_one_layer_alone_is_refused() -> None:
    empty = torch.empty(0)
    with pytest.raises(BackendRefused, match="'cpu' is a part of the native decoder's steps"):
        Cpu().attend(0, empty, empty, empty, None, scale=1.0, window=None)  # type: ignore[arg-type]
