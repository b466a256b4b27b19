"""Random weights at a real model's shape, for speed only: `models.py OUT [--llama-python PYTHON]`, about 2 GB and a minute.

Writes OUT/qwen05 (a Hugging Face folder, bfloat16, Qwen2.5-0.5B's shape, a toy tokenizer of bytes), OUT/qwen05-q8_0.gguf and
OUT/qwen05-q4_0.gguf, both quantised by llama.cpp itself as its users do (Q4_0: its output matrix becomes Q6_K). The python
named last has llama-cpp-python; by default it is this one. What is there already is left alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BOS, END = 256, 258
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Values of llama.cpp's enum llama_ftype.
FILE_TYPES = {"q8_0": 7, "q4_0": 2}
QUANTISE = """
import sys, llama_cpp as api
given = api.llama_model_quantize_default_params()
given.ftype, given.nthread = int(sys.argv[3]), 2
sys.exit(api.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), given))
"""


@dataclass(frozen=True)
class Shape:
    """What matters for speed of a Qwen2 model."""

    name: str = "qwen05"
    hidden: int = 896
    intermediate: int = 4864
    layers: int = 24
    heads: int = 14
    kv_heads: int = 2
    head_dim: int = 64
    vocabulary: int = 151936
    context: int = 8192
    theta: float = 1e6
    eps: float = 1e-6

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """(name in a Hugging Face folder, name in GGUF, shape) of each."""
        C, F, q, kv = self.hidden, self.intermediate, self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "model.embed_tokens.weight", "token_embd.weight", (self.vocabulary, C)
        yield "model.norm.weight", "output_norm.weight", (C,)
        for i in range(self.layers):
            hf, its = f"model.layers.{i}.", f"blk.{i}."
            for name, short, rows in (("q", "q", q), ("k", "k", kv), ("v", "v", kv)):
                yield f"{hf}self_attn.{name}_proj.weight", f"{its}attn_{short}.weight", (rows, C)
                yield f"{hf}self_attn.{name}_proj.bias", f"{its}attn_{short}.bias", (rows,)
            yield f"{hf}self_attn.o_proj.weight", f"{its}attn_output.weight", (C, q)
            yield f"{hf}mlp.gate_proj.weight", f"{its}ffn_gate.weight", (F, C)
            yield f"{hf}mlp.up_proj.weight", f"{its}ffn_up.weight", (F, C)
            yield f"{hf}mlp.down_proj.weight", f"{its}ffn_down.weight", (C, F)
            yield f"{hf}input_layernorm.weight", f"{its}attn_norm.weight", (C,)
            yield f"{hf}post_attention_layernorm.weight", f"{its}ffn_norm.weight", (C,)

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "tie_word_embeddings": True,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "dtype": "bfloat16",
            "bos_token_id": BOS,
            "eos_token_id": END,
            "use_sliding_window": False,
        }


def random_weights(shape: Shape, seed: int = 0) -> dict[str, torch.Tensor]:
    """By Hugging Face name: norms are ones, the rest is noise small enough to stay finite."""
    made = torch.Generator().manual_seed(seed)
    return {
        name: torch.ones(size, dtype=torch.bfloat16)
        if "norm" in name
        else (torch.randn(size, generator=made) * (0.1 if len(size) == 1 else 0.03)).bfloat16()
        for name, _, size in shape.tensors()
    }


def vocabulary(size: int) -> list[str]:
    """The 256 bytes in GPT-2's spelling, three marks, one merge, and fillers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelled = {byte: chr(byte) for byte in printable}
    spelled |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in spelled)}
    tokens = [spelled[byte] for byte in range(256)] + ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "ab"]
    return tokens[:size] + [f"tok{i}" for i in range(len(tokens), size)]


def write_folder(folder: Path, shape: Shape, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokens = vocabulary(shape.vocabulary)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(tokens[BOS : END + 1])
    tokenizer.save(str(folder / "tokenizer.json"))
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[END], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(own, indent=1))
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))  # last: whoever sees it finds a whole folder


def write_gguf(path: Path, shape: Shape, weights: dict[str, torch.Tensor]) -> None:
    """Everything in bfloat16, one-dimensional tensors in float32, as converters do."""
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_name(shape.name)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_rope_freq_base(shape.theta)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(vocabulary(shape.vocabulary))
    writer.add_token_types([3 if BOS <= i <= END else 1 for i in range(shape.vocabulary)])  # 3: a mark, 1: text
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for hf, name, size in shape.tensors():
        if len(size) == 1:
            writer.add_tensor(name, weights[hf].float().numpy())
        else:
            raw = weights[hf].view(torch.int16).numpy().view(np.uint8)
            writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantise(whole: Path, path: Path, python: str) -> None:
    """Raises subprocess.CalledProcessError: that python has no llama-cpp-python, or it failed."""
    part = path.with_suffix(".part")
    command = [python, "-c", QUANTISE, str(whole), str(part), str(FILE_TYPES[path.stem.rsplit("-", 1)[1]])]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    part.rename(path)


def make(out: Path, python: str, shape: Shape = Shape()) -> None:
    """Whatever is missing in `out`."""
    folder = out / shape.name
    missing = [path for kind in FILE_TYPES if not (path := out / f"{shape.name}-{kind}.gguf").exists()]
    if (folder / "config.json").exists() and not missing:
        return
    weights = random_weights(shape)
    write_folder(folder, shape, weights)
    if missing:
        whole = out / f"{shape.name}-bf16.gguf"
        write_gguf(whole, shape, weights)
        for path in missing:
            quantise(whole, path, python)
        whole.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--llama-python", default=sys.executable)
    given = parser.parse_args()
    make(given.out, given.llama_python)
    for path in sorted(given.out.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size / 1e6:8.1f} MB  {path}")
