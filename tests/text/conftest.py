"""Small vocabularies, trained here, as model folders and as GGUF metadata."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 1234 o'clock; we'll see 56 of them!",
    "def f(x):\n    return x ** 2  # squared\n\n\nprint(f(3))\r\n",
    "Grüße aus Köln — naïve café, señor. Ελληνικά και русский текст.",
    "日本語のテキストと中文文本。 한국어 문장입니다.",
    "emoji 👨‍👩‍👧 🇩🇪 ✨ and   many    spaces\t\ttabs",
    "the there then these those that this thing think thank three through",
] * 4

TEXTS = [
    "", " ", "  ", "a", " a", "a ", "Hello, world!", "  leading and trailing  ", "it's we'LL I'M they'd",
    "1 12 123 1234 12345", "x1y22z333", "\n", "\n\n a\n", "tab\tand\r\nnewline", "日本語 中文 한국어",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\U0001f1e9\U0001f1ea", "e\u0301 \u00e9", "…—“quoted”", "a\u00a0b\u3000c",
    "if (x<y) { return &z; }", "ünïcödé", "the there then", "\x00\x01\x7f", "▁ marks ▁▁", "\ufeffbom", "٣٤٥ ½ Ⅷ",
]  # fmt: skip


def save_folder(path: Path, tokenizer: Tokenizer, settings: dict[str, Any], **files: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def byte_level_tokenizer(pre: Any = None, *, bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre or pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(["<|bos|>", "<|im_start|>", "<|im_end|>", "<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
        )
    return tokenizer


def sentencepiece_tokenizer(*, prefix: str | None = None) -> Tokenizer:
    """As converters write SentencePiece BPE. `prefix`: "prepend", "first" (Metaspace) or None."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=[], show_progress=False)
    tokenizer.train_from_iterator([text.replace("\n", "").replace("\t", "") for text in CORPUS], trainer)
    state = json.loads(tokenizer.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *state["vocab"]]
    model = models.BPE(
        vocab={piece: at for at, piece in enumerate(pieces)},
        merges=[tuple(merge) for merge in state["merges"]],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    done = Tokenizer(model)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    if prefix == "first":
        done.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        steps = [normalizers.Prepend("▁"), *steps] if prefix else steps
        done.normalizer = normalizers.Sequence(steps)
    done.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    done.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in pieces[:3]])
    done.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return done


def gguf_of(tokenizer: Tokenizer, **more: Any) -> dict[str, Any]:
    """The metadata that a converter would write for a byte-level tokenizer."""
    state = json.loads(tokenizer.to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(at) for at in range(size)]
    types = [1 if at not in added else 3 if added[at]["special"] else 4 for at in range(size)]
    keys = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": types,
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        "bos_token_id": tokens.index("<|bos|>"),
        "eos_token_id": tokens.index("<|end|>"),
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


@pytest.fixture(scope="session")
def byte_level_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(
        tmp_path_factory.mktemp("byte_level"),
        byte_level_tokenizer(bos=True),
        {"bos_token": "<|bos|>", "eos_token": "<|end|>", "model_max_length": 512},
    )


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(
        tmp_path_factory.mktemp("sentencepiece"),
        sentencepiece_tokenizer(prefix="prepend"),
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Any]:
    """transformers' own tokenizer of a folder."""
    transformers = importlib.import_module("transformers")
    return lambda folder: transformers.AutoTokenizer.from_pretrained(str(folder))
