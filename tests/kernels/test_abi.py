"""The ctypes mirror of astrai_cpu.h: every struct to the byte, every function, every number."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest

from astrai_runtime.kernels._abi import ABI, OPERATIONS, PARTS, SIGNATURES, STRUCTS
from astrai_runtime.kernels._build import Compiler, find_compiler
from astrai_runtime.kernels.base import FORMATS, SOURCE_TYPES

HEADER = Path(__file__).resolve().parent.parent.parent / "csrc" / "cpu" / "include" / "astrai_cpu.h"
TEXT = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.DOTALL)
PROTOTYPES = dict(re.findall(r"\b(astrai_\w+)\(([^;{]*)\);", TEXT))
# The header's words for the types of the C interface.
KINDS = {ctypes.c_int32: "int32_t", ctypes.c_int64: "int64_t", ctypes.c_float: "float"}


def test_structs_have_the_sizes_and_offsets_that_a_compiler_gives_them(tmp_path: Path) -> None:
    compiler = find_compiler(os.environ)
    if not isinstance(compiler, Compiler):
        pytest.skip(compiler)
    lines, expected = [], []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            expected.append(f"{name}.{field} {getattr(struct, field).offset}")
    source = tmp_path / "sizes.cpp"
    body = "\n".join(lines)
    source.write_text(f'#include <cstddef>\n#include <cstdio>\n#include "{HEADER}"\nint main() {{\n{body}\n}}\n')
    subprocess.run([*compiler.command, "-std=c++17", str(source), "-o", str(tmp_path / "sizes")], check=True)
    said = subprocess.run([str(tmp_path / "sizes")], check=True, capture_output=True, text=True).stdout.splitlines()
    assert said == expected


def test_every_struct_of_the_header_and_every_field_is_mirrored() -> None:
    declared = dict(re.findall(r"typedef struct (\w+) \{(.*?)\}", TEXT, flags=re.DOTALL))
    assert set(declared) == set(STRUCTS)
    for name, body in declared.items():
        fields = [re.search(r"(\w+)\s*$", part)[1] for line in body.split(";") for part in line.split(",") if part.strip()]
        assert fields == [field for field, *_ in STRUCTS[name]._fields_], name


def test_every_function_of_the_header_is_in_the_table_with_its_arguments() -> None:
    assert set(PROTOTYPES) == set(SIGNATURES)
    for name, text in PROTOTYPES.items():
        declared = [] if text.strip() == "void" else [argument.strip() for argument in text.split(",")]
        _, takes = SIGNATURES[name]
        assert len(declared) == len(takes), f"{name}({text})"
        for argument, kind in zip(declared, takes, strict=True):
            plain = KINDS.get(kind)
            assert ("*" in argument) == (plain is None), f"{name}: {argument}"
            assert plain is None or argument.startswith(plain), f"{name}: {argument}"


def test_numbers_are_the_headers() -> None:
    assert int(re.search(r"ASTRAI_CPU_ABI (\d+)", TEXT)[1]) == ABI
    assert int(re.search(r"ASTRAI_PARTS (\d+)", TEXT)[1]) == len(PARTS)
    numbers = {name: int(value) for name, value in re.findall(r"ASTRAI_(\w+) = (\d+)", TEXT)}
    assert [numbers[name.upper()] for name in FORMATS] == list(range(len(FORMATS)))
    assert [numbers[name.upper()] for name in OPERATIONS] == list(range(len(OPERATIONS)))
    spelt = {"F32": "FLOAT32", "BF16": "BFLOAT16", "F16": "FLOAT16"}
    found = {f"FROM_{spelt.get(name, name)}": source.number for name, source in SOURCE_TYPES.items()}
    assert found == {name: value for name, value in numbers.items() if name.startswith("FROM_")}


def test_block_sizes_are_those_of_ggml() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for name, source in SOURCE_TYPES.items():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[name]] == (source.block_values, source.block_bytes)
