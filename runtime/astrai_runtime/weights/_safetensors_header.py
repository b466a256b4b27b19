"""The header of a safetensors file, read strictly: nothing is allocated before its size has been checked.

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astrai_runtime.errors import WeightsError
from astrai_runtime.weights._pieces import Pieces, stranger
from astrai_runtime.weights.base import TensorInfo

MAX_HEADER = 100_000_000  # bytes; the reference implementation's limit

# Bits of one element, by the format's names.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Tensors by name, and where each one's bytes begin in the file."""

    tensors: dict[str, TensorInfo]
    offsets: dict[str, int]


class _Duplicate(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise _Duplicate(name)
        result[name] = value
    return result


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except _Duplicate as error:
        raise WeightsError(f"{path}: the header names '{error}' twice") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: the header is not JSON; this is no safetensors file, or a damaged one") from error
    if not isinstance(header, dict):
        raise WeightsError(f"{path}: the header is not a JSON object; this is no safetensors file")
    header.pop("__metadata__", None)
    return header


def _tensor(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise WeightsError(f"{path}: tensor '{name}' lacks dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise WeightsError(f"{path}: tensor '{name}' has the unknown type {dtype!r:.40}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise WeightsError(f"{path}: tensor '{name}' has the impossible shape {shape!r:.80}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise WeightsError(f"{path}: tensor '{name}' has the impossible data_offsets {offsets!r:.80}")
    begin, end = offsets
    n_bytes = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if end - begin != n_bytes:
        raise WeightsError(
            f"{path}: tensor '{name}' of type {dtype} and shape {shape!r:.80} needs {n_bytes} bytes, "
            f"but its data_offsets span {end - begin}"
        )
    return TensorInfo(name, tuple(shape), dtype, n_bytes, path), begin, end


def read_header(file: Pieces) -> SafetensorsHeader:
    """Checks and returns the header of a mapped file.

    Raises:
        WeightsError: one line that names the file and what is wrong with it.
    """
    path = file.paths[0]
    head = bytes(file.view(0, min(file.size, 512)))
    if (what := stranger(head)) is not None:
        raise WeightsError(f"{path}: {what}")
    if head.startswith(b"GGUF"):
        raise WeightsError(f"{path}: this is a GGUF file under another name; rename it to .gguf and use that path")
    if file.size < 8:
        raise WeightsError(f"{path}: the file is cut off: {file.size} bytes, but the header's length alone takes 8")
    length = int.from_bytes(head[:8], "little")
    if length > min(MAX_HEADER, file.size - 8):
        raise WeightsError(
            f"{path}: the header would take {length} bytes, but the file has {file.size} "
            f"(and no header may exceed {MAX_HEADER}); it is cut off, or no safetensors file"
        )
    header = _parse(path, bytes(file.view(8, 8 + length)))
    data = 8 + length
    tensors: dict[str, TensorInfo] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if not name or not name.isprintable():
            raise WeightsError(f"{path}: a tensor's name is {name!r:.80}; the header is damaged")
        tensors[name], begin, end = _tensor(path, name, entry)
        spans.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(spans):
        if begin != at:
            fault = "overlap those of another tensor" if begin < at else f"leave a hole of {begin - at} bytes before them"
            raise WeightsError(f"{path}: the bytes of tensor '{name}' {fault}")
        at = end
        if data + end > file.size:
            raise WeightsError(
                f"{path}: tensor '{name}' ends at byte {data + end}, but the file has only {file.size}; it is cut off"
            )
    if data + at != file.size:
        raise WeightsError(f"{path}: {file.size - data - at} bytes follow the last tensor; the header is damaged")
    return SafetensorsHeader(tensors, {name: data + begin for begin, _, name in spans})
