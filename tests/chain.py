"""F-CHAIN: a Llama checkpoint made by hand that writes a script: every token is followed by one other, whatever came before.

Attention and MLP add nothing, the embeddings are unit vectors, and the head sends each to its successor. So public input
alone decides what the real engine generates, token by token: a message `call(n)` starts script n, and the message BROKEN
has a row of NaN as its embedding, which makes the model fail on that request.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from astrai_runtime.text._spelling import byte_of_char
from tests import live

CONTEXT = 512
_FIRST_CALL = 0xE000  # private characters: no script holds one
_CALLS = 256
BROKEN = chr(_FIRST_CALL + _CALLS - 1)
END, BOS = "<end>", "<bos>"
TEMPLATE = "{{ messages[-1].content }}"


@dataclass(frozen=True)
class Script:
    """Tokens, given by their bytes, one after the other. `again`: from the last to the first; else the last is the end."""

    pieces: tuple[bytes, ...]
    again: bool = False

    @property
    def text(self) -> bytes:
        return b"".join(self.pieces)


def call(number: int) -> str:
    """The message that starts script `number`."""
    assert number < _CALLS - 1
    return chr(_FIRST_CALL + number)


def cuts(text: str) -> list[Script]:
    """The text in two tokens, once for every place between two bytes."""
    data = text.encode()
    return [Script((data[:at], data[at:])) for at in range(1, len(data))]


def bitwise(text: str) -> Script:
    """The text in the smallest tokens: single bytes, or, where all of those stand already, the shortest new piece."""
    data, at = text.encode(), 0
    pieces: list[bytes] = []
    while at < len(data):
        sizes = (size for size in range(1, len(data) - at + 1) if data[at : at + size] not in pieces)
        size = next(sizes, 0)
        if size:
            pieces.append(data[at : at + size])
            at += size
        else:  # the rest repeats a token: it joins the one before
            pieces[-1] += data[at:]
            at = len(data)
    assert len(set(pieces)) == len(pieces)
    return Script(tuple(pieces))


def write_chain(folder: Path, scripts: Sequence[Script]) -> Path:
    """A Hugging Face folder that plays the scripts. One token has one successor, in all of them together.

    Raises:
        ValueError: two scripts want different successors of one token.
    """
    import torch
    from safetensors.torch import save_file

    ids = _Vocabulary()
    follows: dict[int, int] = {}
    for number, script in enumerate(scripts):
        tokens = [ids.of(piece) for piece in script.pieces]
        pairs = [*itertools.pairwise(tokens), (tokens[-1], tokens[0] if script.again else ids.end)]
        for token, successor in [(ids.calls[number], tokens[0]), *pairs]:
            if follows.setdefault(token, successor) != successor:
                raise ValueError(f"the token {ids.pieces[token]!r} of script {number} has another successor already")
    size = len(ids.pieces)
    hidden = -(-size // 16) * 16
    embed = torch.eye(size, hidden)
    embed[ids.calls[-1]] = float("nan")
    head = torch.zeros(size, hidden)
    for token in range(size):
        head[follows.get(token, ids.end), token] = 8.0
    inner, one_head = 16, 16
    layer = "model.layers.0"
    tensors = {
        "model.embed_tokens.weight": embed,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(hidden),
        f"{layer}.input_layernorm.weight": torch.ones(hidden),
        f"{layer}.post_attention_layernorm.weight": torch.ones(hidden),
        f"{layer}.self_attn.q_proj.weight": torch.ones(one_head, hidden),
        f"{layer}.self_attn.k_proj.weight": torch.ones(one_head, hidden),
        f"{layer}.self_attn.v_proj.weight": torch.ones(one_head, hidden),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(hidden, one_head),
        f"{layer}.mlp.gate_proj.weight": torch.ones(inner, hidden),
        f"{layer}.mlp.up_proj.weight": torch.ones(inner, hidden),
        f"{layer}.mlp.down_proj.weight": torch.zeros(hidden, inner),
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": one_head,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": ids.end,
    }
    (folder / "config.json").write_text(json.dumps(config))
    ids.save(folder)
    return folder


class _Vocabulary:
    """Every byte, the tokens that calls merge into, two control tokens, and the scripts' own pieces as they come."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = [bytes([byte]) for byte in range(256)]
        self._ids = {piece: at for at, piece in enumerate(self.pieces)}
        self._merges: list[tuple[bytes, bytes]] = []
        self.calls = [self._merged(chr(_FIRST_CALL + number).encode()) for number in range(_CALLS)]
        self.bos, self.end = self._added(BOS), self._added(END)

    def of(self, piece: bytes) -> int:
        if piece not in self._ids:
            self._ids[piece] = len(self.pieces)
            self.pieces.append(piece)
        return self._ids[piece]

    def _added(self, text: str) -> int:
        self.pieces.append(text.encode())
        return len(self.pieces) - 1

    def _merged(self, data: bytes) -> int:
        """The token into which exactly these bytes merge."""
        for size in range(2, len(data) + 1):
            rule = (data[: size - 1], data[size - 1 : size])
            if rule not in self._merges:
                self._merges.append(rule)
                self.of(data[:size])
        return self._ids[data]

    def save(self, folder: Path) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        chars = {byte: char for char, byte in byte_of_char().items()}

        def spelled(piece: bytes) -> str:
            return "".join(chars[byte] for byte in piece)

        vocab = {spelled(piece): at for at, piece in enumerate(self.pieces) if at not in (self.bos, self.end)}
        vocab |= {BOS: self.bos, END: self.end}
        tokenizer = Tokenizer(models.BPE(vocab, [(spelled(a), spelled(b)) for a, b in self._merges]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (BOS, END)])
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": BOS, "eos_token": END, "chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@contextmanager
def serving(folder: Path, *overrides: str) -> Iterator[str]:
    """A live service in this process over a checkpoint folder. Yields its URL."""
    with live.serving("model=local", "model.name=chain", f"model.source.path={folder}", *overrides) as url:
        yield url
