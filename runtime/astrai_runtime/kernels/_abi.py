"""csrc/cpu/include/astrai_cpu.h for ctypes: its structs field by field, and one table of its functions.

A test compiles the header and compares sizes and offsets, and that every function of the header is in the table.
Pointers are addresses (`array.ctypes.data`, `tensor.data_ptr()`): what they point at must outlive the call, or the
program that was opened on it.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

ABI = 1
PARTS = ("embed", "qkv", "rope_store", "attention", "o", "gate_up", "down", "head")  # of astrai_program_profile
OPERATIONS = ("penalties", "logit_bias", "temperature", "top_k", "top_p", "min_p")  # their places are Operation.kind


class Matrix(Structure):
    """A packed matrix; see `kernels.base.MatrixShape` for its sizes."""

    _fields_ = [
        ("format", c_int32),
        ("rows", c_int32),
        ("cols", c_int32),
        ("reserved", c_int32),
        ("data", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
    ]


class Layer(Structure):
    """One decoder layer. Norm weights and biases are addresses of float32 numbers; None where there are none."""

    _fields_ = [
        ("n_heads", c_int32),
        ("n_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("window", c_int32),
        ("activation", c_int32),
        ("rope", c_int32),
        ("scale", c_float),
        ("attn_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("post_attn_norm", c_void_p),
        ("post_mlp_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("o_bias", c_void_p),
        ("gate_up_bias", c_void_p),
        ("down_bias", c_void_p),
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    ]


class Decoder(Structure):
    """A whole decoder. `layers` is the address of an array of Layer."""

    _fields_ = [
        ("hidden", c_int32),
        ("vocab", c_int32),
        ("n_layers", c_int32),
        ("n_ropes", c_int32),
        ("kv_format", c_int32),
        ("norm_eps", c_float),
        ("embedding_scale", c_float),
        ("reserved", c_int32),
        ("final_norm", c_void_p),
        ("embed", Matrix),
        ("head", Matrix),
        ("layers", c_void_p),
        ("frequencies", c_void_p),
        ("rope_factors", c_void_p),
    ]


class KV(Structure):
    """Where keys and values lie."""

    _fields_ = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("layer_stride", c_int64),
        ("table", c_void_p),
        ("table_stride", c_int64),
    ]


class Step(Structure):
    """One step over any mix of decoding and prompt tokens."""

    _fields_ = [
        ("n_tokens", c_int32),
        ("n_sequences", c_int32),
        ("n_logits", c_int32),
        ("reserved", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("starts", c_void_p),
        ("rows", c_void_p),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("kv", KV),
    ]


class Operation(Structure):
    """What is done to a row of logits before its token is chosen; `kind` is an index into OPERATIONS."""

    _fields_ = [
        ("kind", c_int32),
        ("n", c_int32),
        ("value", c_double),
        ("ids", c_void_p),
        ("values", c_void_p),
    ]


class Choice(Structure):
    """One row of logits and what to do with it; `token` is the answer."""

    _fields_ = [
        ("logits", c_void_p),
        ("operations", c_void_p),
        ("tokens", c_void_p),
        ("n_operations", c_int32),
        ("n_tokens", c_int32),
        ("n_prompt", c_int32),
        ("token", c_int32),
        ("u", c_double),
    ]


STRUCTS: dict[str, type[Structure]] = {
    "astrai_matrix": Matrix,
    "astrai_layer": Layer,
    "astrai_decoder": Decoder,
    "astrai_kv": KV,
    "astrai_step": Step,
    "astrai_operation": Operation,
    "astrai_choice": Choice,
}

_matrix, _layer, _decoder, _step = POINTER(Matrix), POINTER(Layer), POINTER(Decoder), POINTER(Step)
_pool, _program, _sampler, _address = c_void_p, c_void_p, c_void_p, c_void_p
_i32, _i64, _text = c_int32, c_int64, c_char_p

# name: what it returns, what it takes. In the order of the header.
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "astrai_error": (_text, ()),
    "astrai_abi": (_i32, ()),
    "astrai_built_for": (_text, ()),
    "astrai_runs_here": (_text, ()),
    "astrai_pool_open": (_pool, (_i32, _i32)),
    "astrai_pool_close": (None, (_pool,)),
    "astrai_allocate": (_address, (_i64,)),
    "astrai_free": (None, (_address, _i64)),
    "astrai_pack": (_i32, (_pool, _matrix, _i32, _address, _i64, _i32, _i32)),
    "astrai_unpack": (_i32, (_matrix, _address, _i32, _address)),
    "astrai_program_open": (_program, (_text, _decoder, _pool, _i32, _i32)),
    "astrai_program_close": (None, (_program,)),
    "astrai_program_run": (_i32, (_program, _step)),
    "astrai_program_bytes": (_i64, (_program,)),
    "astrai_program_profile": (None, (_program, POINTER(c_double))),
    "astrai_matmul": (_i32, (_text, _pool, _matrix, _address, _i32, _address, _address, _i64)),
    "astrai_attention": (
        _i32,
        (_text, _pool, _layer, _i32, _i32, _step, _address, _address, _address, _address),
    ),
    "astrai_rms_norm": (_i32, (_text, _address, _address, _i32, _i32, c_float, _address)),
    "astrai_sampler_open": (_sampler, (_text, _pool, _i32)),
    "astrai_sampler_close": (None, (_sampler,)),
    "astrai_sampler_choose": (_i32, (_sampler, POINTER(Choice), _i32)),
    "astrai_sampler_likeliest": (_i32, (_sampler, _address, _i32, _address, _address, POINTER(c_double))),
}


def bind(library: ctypes.CDLL) -> list[str]:
    """Declares every function of the table; returns the names that the library does not have."""
    missing = []
    for name, (returns, takes) in SIGNATURES.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            missing.append(name)
            continue
        function.restype, function.argtypes = returns, list(takes)
    return missing
