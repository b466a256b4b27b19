"""Bytes that a deployment needs, part by part: closed formulas over a DecoderSpec, no torch.

Legend: T tokens in the largest step, M the longest context, B admitted sequences, V vocabulary, C hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from astrai_runtime.kernels.base import GROUP, TILE, Format, padded
from astrai_runtime.machine import Device
from astrai_runtime.model._matrices import Stored, packed_bytes
from astrai_runtime.model.base import DecoderSpec
from astrai_runtime.weights._fill import SLICE
from astrai_runtime.weights.base import TensorInfo

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
USABLE = 0.9  # of the machine's memory; the rest is for allocator slack and whatever else runs there
# Resident bytes of a tokenizer for one entry of its vocabulary: Gemma's 262,144 pieces with their merges add 137 to 146 MiB
# to a process by `tokenizers`, and 35 by the compiled library, or 82 at the first start, when the merges are sought (VmRSS
# before and after text._gguf.from_gguf). Vocabularies with fewer merges take less.
TOKEN_RECORD = 560
COMPILED_TOKEN_RECORD = 256
PAGE_RECORD = 56  # bytes of one page in the allocator: three list entries of 8, and an int object of 28 in blocks of 16
EDGE_RECORD = 400  # of one page in the prefix cache: the edge, its dictionary, its key (measured with tracemalloc)
EDGE_TOKEN = 36  # of one token in an edge's key: an entry of 8, and an int object of 28
WORKER = 1 << 19  # scratch of one native thread: scores of 64 queries over 128 keys, a block of keys, two unpacked tiles
RUNTIME = {
    # VmRSS after `import torch, litestar, uvicorn, tokenizers, jinja2, safetensors, gguf` and a linear of 64 x 64 in float32
    # and bfloat16 (torch 2.13 CPU, Python 3.11) is 256,442,368; threads and heaps of a process that serves add 10-20 MB.
    "cpu": 256 << 20,
    # CUDA context, cuBLAS workspace and kernels of one process: 500-600 MB on data-centre GPUs; the upper end is used.
    "cuda": 600_000_000,
}


@dataclass(frozen=True, slots=True)
class Memory:
    """What is needed on the model's device, in bytes, against what the machine offers.

    `loading` is held besides the weights while they are read, before the KV pool exists: the two never add up.
    """

    weights: int
    kv: int
    tables: int  # request-to-token table and allocator
    activations: int  # of the largest step, logits included
    loading: int
    tokenizer: int
    overhead: int  # Python, torch, server
    machine: int

    @property
    def serving(self) -> int:
        return self.overhead + self.tokenizer + self.weights + self.kv + self.tables + self.activations

    @property
    def peak(self) -> int:
        """The larger of loading and serving: what decides whether it fits."""
        return max(self.serving, self.overhead + self.tokenizer + self.weights + self.loading)

    @property
    def usable(self) -> int:
        return math.floor(self.machine * USABLE)

    @property
    def fits(self) -> bool:
        return self.peak <= self.usable


def held_bytes(spec: DecoderSpec, weights: str, stored: Stored | None) -> int:
    """All weights in memory: packed from what is `stored` for the native kernels, or torch's tensors where that is None."""
    return weight_bytes(spec, weights) if stored is None else packed_bytes(spec, cast("Format", weights), stored)


def weight_bytes(spec: DecoderSpec, dtype: str) -> int:
    """All of torch's weights, norms in float32 whatever `dtype` is; a tied head is the embedding and counts once."""
    shapes = spec.tensor_shapes()
    norms = sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("norm.weight"))
    return spec.n_parameters() * BYTES[dtype] + norms * (4 - BYTES[dtype])


def activation_bytes(spec: DecoderSpec, dtype: str, T: int, S: int, M: int) -> int:
    """The largest step of the torch interpreter: T tokens through the widest layer, then S rows of float32 logits.

    Residual and normed input live throughout. Attention holds the joined q, k and v, the rotated q and k (and their
    float32 norms where the model has some), its output, one sequence's keys and values spread over the query heads, and
    the mask of T queries over what they see, as booleans and as numbers. The MLP holds gate and up, the activated gate
    and the product. Sampling holds the logits as computed, in float32, and once more with 8 bytes an entry.
    """
    size, C = BYTES[dtype], spec.hidden_size
    widest = 0
    for layer in set(spec.layers):
        q, kv = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
        seen = M if layer.window is None else min(M, layer.window + T)
        projected = (4 * q + 4 * kv) * size + (8 * (q + kv) if layer.qk_norm else 0)
        attention = T * projected + 2 * seen * q * size + T * seen * (1 + size)
        widest = max(widest, attention, T * 4 * layer.intermediate_size * size)
    residual = T * C * (2 * size + 4)  # the norm works in float32
    logits = S * spec.vocab_size * (size + 4 + 8)
    return max(residual + widest, T * C * size + logits)


def native_activation_bytes(spec: DecoderSpec, T: int, S: int, threads: int) -> int:
    """The native program's scratch memory, taken when it opens, and S rows of logits; see csrc/cpu/program/decoder.h.

    Each token has its residual, a layer's contribution to it, q, k and v, attention's output, gate and up, what the widest
    matrix reads, and the turns of its rotary embeddings. Sampling holds the logits and 8 bytes an entry besides.
    """
    C = padded(spec.hidden_size, GROUP)
    qkv = max(padded((layer.n_heads + 2 * layer.n_kv_heads) * layer.head_dim, TILE) for layer in spec.layers)
    attended = max(padded(layer.n_heads * layer.head_dim, GROUP) for layer in spec.layers)
    F = max(padded(layer.intermediate_size, GROUP) for layer in spec.layers)
    turns = len({layer.rope for layer in spec.layers}) * max(layer.head_dim for layer in spec.layers)
    token = 2 * C + qkv + attended + 2 * F + max(C, attended, F) + turns
    return 4 * (T * token + S * C) + S * padded(spec.vocab_size, TILE) * (4 + 8) + threads * WORKER


def record_bytes(page_size: int, *, shared: bool) -> int:
    """What keeping account of one page takes: in the allocator, and in the prefix cache where pages are shared."""
    return PAGE_RECORD + (EDGE_RECORD + page_size * EDGE_TOKEN if shared else 0)


def table_bytes(B: int, M: int, n_pages: int, record: int) -> int:
    """The int32 request-to-token table, and `record` bytes (see `record_bytes`) for every page."""
    return B * M * 4 + n_pages * record


def loading_bytes(tensors: Iterable[TensorInfo], *, from_file: bool) -> int:
    """What reading the largest tensor holds besides its result: from a file one slice, made up at random all of it.

    A slice passes through float32 with two more buffers of the same size for a quantisation's scales and codes.
    """
    elements = max((math.prod(info.shape) for info in tensors), default=0)
    return 3 * 4 * min(elements, SLICE) if from_file else 4 * elements


def tokenizer_bytes(spec: DecoderSpec, device: Device, *, compiled: bool) -> int:
    """The vocabulary and its merges, in main memory: they take nothing from a GPU. `compiled`: in the library."""
    return spec.vocab_size * (COMPILED_TOKEN_RECORD if compiled else TOKEN_RECORD) if device == "cpu" else 0


def overhead_bytes(device: Device) -> int:
    """Python, torch and the server, before any tensor."""
    return RUNTIME[device]


def size(n_bytes: int) -> str:
    """Bytes for people: `511.4 MiB`."""
    amount, units = float(n_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(amount) >= 1000 and len(units) > 1:  # never four digits before the point
        amount /= 1024
        del units[0]
    return f"{n_bytes} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"
