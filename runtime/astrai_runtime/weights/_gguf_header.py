"""The header of a GGUF file, read strictly and fast: long arrays are only skipped, and decoded when somebody looks.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astrai_runtime.weights._gguf_values import Cursor
from astrai_runtime.weights._pieces import Pieces, stranger
from astrai_runtime.weights.base import TensorInfo

VERSIONS = (2, 3)
MAX_ENTRIES = 100_000  # metadata keys, and tensors; real files have tens and thousands
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_NAME = 1024  # bytes

# ggml's number of a tensor type -> name, elements in a block, bytes of a block.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata, tensors by name, and where each one's bytes begin in the (joined) file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]


def _counts(cursor: Cursor) -> tuple[int, int]:
    """Magic, version and bounds of the two counts, which are returned: tensors, metadata keys."""
    head = cursor.peek(512)
    if (what := stranger(head)) is not None:
        raise cursor.error(what)
    if head[:4] != b"GGUF":
        raise cursor.error(f"this is no GGUF file: it begins with {head[:4]!r}, not with b'GGUF'")
    cursor.at = 4
    version = cursor.u32("the version")
    if version not in VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
            raise cursor.error("this GGUF file is big-endian; only little-endian files are supported")
        raise cursor.error(f"GGUF version {version} is not supported; versions 2 and 3 are")
    n_tensors, n_keys = cursor.u64("the number of tensors"), cursor.u64("the number of metadata keys")
    for what, n in (("tensors", n_tensors), ("metadata keys", n_keys)):
        if n > MAX_ENTRIES:
            raise cursor.error(f"the header claims {n} {what}, more than any real file has; it is damaged")
    return n_tensors, n_keys


def _metadata(cursor: Cursor, n_keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(n_keys):
        key = cursor.name("a metadata key", MAX_NAME)
        if key in metadata:
            raise cursor.error(f"the metadata key '{key}' appears twice")
        metadata[key] = cursor.value(key)
    if not isinstance(metadata.get("general.architecture"), str):
        raise cursor.error("the metadata lacks 'general.architecture', so nobody can tell which model this is")
    if (pieces := metadata.get("split.count")) is not None and pieces != 1:
        raise cursor.error(f"this is one of {pieces} split files; join them with `llama-gguf-split --merge` first")
    return metadata


def _alignment(cursor: Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    valid = isinstance(alignment, int) and 0 < alignment <= 2**20 and alignment & (alignment - 1) == 0
    if not valid:
        raise cursor.error(f"general.alignment is {alignment!r:.40}; it must be a power of two")
    return int(alignment)


def _tensor(cursor: Cursor, path: Path) -> tuple[TensorInfo, int]:
    """One tensor's description and its offset from the beginning of the data."""
    name = cursor.name("a tensor's name", MAX_NAME)
    n_dims = cursor.u32(f"the dimensions of tensor '{name}'")
    if n_dims > MAX_DIMS:
        raise cursor.error(f"tensor '{name}' has {n_dims} dimensions; at most {MAX_DIMS} are possible")
    dims = [cursor.u64(f"the shape of tensor '{name}'") for _ in range(n_dims)]
    number = cursor.u32(f"the type of tensor '{name}'")
    if number not in TYPES:
        raise cursor.error(f"tensor '{name}' has the unknown type number {number}")
    kind, block, block_bytes = TYPES[number]
    n_elements = math.prod(dims)
    if 0 in dims or n_elements * block_bytes >= 2**63:
        raise cursor.error(f"tensor '{name}' has the impossible shape {tuple(reversed(dims))}")
    if (dims[0] if dims else 1) % block:
        raise cursor.error(f"tensor '{name}' has rows of {dims[0] if dims else 1} elements, no multiple of {kind}'s {block}")
    n_bytes = n_elements // block * block_bytes
    # ggml counts dimensions from the innermost, torch from the outermost.
    return TensorInfo(name, tuple(reversed(dims)), kind, n_bytes, path), cursor.u64(f"the offset of tensor '{name}'")


def read_header(file: Pieces, path: Path) -> GgufHeader:
    """Checks and returns the header of a mapped file, which must lie within its first piece; `path` names the whole.

    Long arrays in `metadata` are lazy sequences that need the file to stay open until they are first looked at.

    Raises:
        WeightsError: one line that names the file and what is wrong with it.
    """
    cursor = Cursor(file)
    n_tensors, n_keys = _counts(cursor)
    metadata = _metadata(cursor, n_keys)
    alignment = _alignment(cursor, metadata)
    tensors: dict[str, TensorInfo] = {}
    relative: dict[str, int] = {}
    for _ in range(n_tensors):
        info, offset = _tensor(cursor, path)
        if info.name in tensors:
            raise cursor.error(f"tensor '{info.name}' is described twice")
        if offset % alignment:
            raise cursor.error(f"tensor '{info.name}' begins at offset {offset}, no multiple of the alignment {alignment}")
        tensors[info.name], relative[info.name] = info, offset
    data = -(-cursor.at // alignment) * alignment
    end = 0
    for name in sorted(relative, key=relative.__getitem__):
        if relative[name] < end:
            raise cursor.error(f"the bytes of tensor '{name}' overlap those of another tensor")
        end = relative[name] + tensors[name].n_bytes
        if data + end > file.size:
            raise cursor.error(
                f"tensor '{name}' ends at byte {data + end}, but the file has only {file.size}; it is cut off"
            )
    return GgufHeader(metadata, tensors, {name: data + offset for name, offset in relative.items()})
