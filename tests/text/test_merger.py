"""The compiled merger gives the ids that `tokenizers` gives, whatever the vocabulary, and refuses what it cannot do."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astrai_runtime.kernels._build import COMMON, Compiler, find_compiler
from astrai_runtime.text._backend import BackendCodec
from astrai_runtime.text._gguf import from_gguf
from astrai_runtime.text._merger import MergerCodec, open_merger
from astrai_runtime.text._merges import MergeCache
from astrai_runtime.text.tokenizer import Tokenizer

from .conftest import TEXTS

SOURCES = Path(__file__).resolve().parent.parent.parent / "csrc" / "cpu"
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
LETTERS = "ab▁ é\n"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = find_compiler(os.environ)
    if not isinstance(compiler, Compiler):
        pytest.skip(compiler)
    target = tmp_path_factory.mktemp("merger") / "merger.so"
    source = SOURCES / "text" / "merger.cpp"
    command = [*compiler.command, *COMMON, "-Wall", "-Wextra", "-Werror", "-shared", f"-I{SOURCES}", str(source)]
    subprocess.run([*command, "-o", str(target)], check=True)
    return ctypes.CDLL(str(target))


def vocabulary(tokens: Sequence[tuple[str, int]], **more: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece vocabulary of texts and types; earlier pieces have better scores."""
    keys = {
        "model": "llama",
        "tokens": [text for text, _ in tokens],
        "token_type": [kind for _, kind in tokens],
        "scores": [-float(at) for at in range(len(tokens))],
        "add_bos_token": False,
        **more,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def both(metadata: dict[str, Any], library: ctypes.CDLL) -> tuple[Tokenizer, Tokenizer]:
    """Merged by the library, and by `tokenizers`."""
    native, plain = from_gguf(metadata, library=library), from_gguf(metadata)
    assert isinstance(native._codec, MergerCodec)
    assert isinstance(plain._codec, BackendCodec)
    return native, plain


BYTES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
PIECES = ["a", "b", "▁", "ab", "ba", "▁a", "aba", "▁ab", "abab", "aa", "é", "▁▁", "bb", "▁b", "éa"]


@st.composite
def vocabularies(draw: st.DrawFn) -> dict[str, Any]:
    pieces = draw(st.lists(st.text("ab▁é", min_size=1, max_size=5), unique=True, max_size=30))
    kinds = dict.fromkeys(pieces, NORMAL)
    for text in draw(st.lists(st.text("ab<>\n ", min_size=1, max_size=4), unique=True, max_size=6)):
        kinds[text] = draw(st.sampled_from([CONTROL, USER, UNKNOWN, UNUSED]))
    tokens = [*([("<unk>", UNKNOWN)] if draw(st.booleans()) else []), *kinds.items()]
    tokens += draw(st.sampled_from([[], BYTES, BYTES[:128]]))
    return vocabulary(tokens or [("a", NORMAL)], add_space_prefix=draw(st.booleans()))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(vocabularies(), st.lists(st.text("ab▁é<>\n x語", max_size=25), min_size=1, max_size=8))
def test_every_vocabulary_and_text_gets_the_same_ids(
    library: ctypes.CDLL, metadata: dict[str, Any], said: list[str]
) -> None:
    native, plain = both(metadata, library)
    for text in said:
        for special in (False, True):
            assert native.encode(text, special=special) == plain.encode(text, special=special), (text, special)
        assert native.encode_part(text) == plain.encode_part(text)


def test_everything_else_about_the_tokenizers_is_the_same_too(library: ctypes.CDLL) -> None:
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("<end_of_turn>", CONTROL), ("<b>", USER), ("left", UNUSED), *BYTES]
    metadata = vocabulary([*tokens, *((piece, NORMAL) for piece in PIECES)], bos_token_id=1, add_bos_token=True)
    native, plain = both(metadata, library)
    assert native.fingerprint() == plain.fingerprint()
    assert (native.bos_id, native.eos_ids, native.add_bos) == (plain.bos_id, plain.eos_ids, plain.add_bos)
    assert native.special_tokens == plain.special_tokens
    assert native.vocab_size == plain.vocab_size == len(metadata["tokenizer.ggml.tokens"])
    for at in range(plain.vocab_size):
        assert native.token_bytes(at) == plain.token_bytes(at), at
    for text in TEXTS:
        assert native.encode(text) == plain.encode(text), text
        assert native.decode(native.encode(text)) == plain.decode(plain.encode(text))


def test_many_threads_share_one_merger(library: ctypes.CDLL) -> None:
    native, plain = both(vocabulary([*BYTES, *((piece, NORMAL) for piece in PIECES)]), library)
    texts = [text * 20 for text in TEXTS]
    wanted = [plain.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(lambda _: [native.encode(text) for text in texts], range(16)):
            assert found == wanted


def test_a_text_of_one_letter_takes_no_square_of_its_length(library: ctypes.CDLL) -> None:
    native, _ = both(vocabulary([("a", NORMAL), ("aa", NORMAL), ("aaaa", NORMAL)]), library)
    assert len(native.encode("a" * 400_000, bos=False)) == 100_000  # the opening space is no token and is left out


def test_texts_that_come_twice_are_left_to_tokenizers(library: ctypes.CDLL) -> None:
    metadata = vocabulary([("a", NORMAL), ("b", NORMAL), ("a", CONTROL), ("ab", NORMAL)])
    found = from_gguf(metadata, library=library)
    assert isinstance(found._codec, BackendCodec)
    assert found.encode("ab") == from_gguf(metadata).encode("ab")


def test_a_library_without_a_merger_changes_nothing() -> None:
    metadata = vocabulary([("a", NORMAL), ("b", NORMAL), ("ab", NORMAL)])
    found = from_gguf(metadata, library=ctypes.CDLL(None))
    assert isinstance(found._codec, BackendCodec)
    assert found.encode("ab") == from_gguf(metadata).encode("ab")


def test_tokenizers_is_imported_only_where_it_merges() -> None:
    program = (
        "import sys\n"
        "from astrai_runtime.text._gguf import from_gguf\n"
        "from astrai_runtime.text.chat_template import ChatTemplate\n"
        "assert 'tokenizers' not in sys.modules\n"
        f"from_gguf({vocabulary([('a', NORMAL)])!r})\n"
        "assert 'tokenizers' in sys.modules\n"
    )
    paths = os.pathsep.join(str(SOURCES.parent.parent / folder) for folder in ("", "runtime"))
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PYTHONPATH": paths})


def packed(*texts: bytes) -> bytes:
    return b"".join(len(text).to_bytes(8, "little") + text for text in texts)


@pytest.mark.parametrize(("texts", "merges"), [
    (packed(b"a", b"b", b"ab")[:-1], []), (packed(b"a", b"b", b"ab") + b"!", []), (packed(b"a", b"b"), []),
    (packed(b"a", b"\xff", b"ab"), []), (packed(b"a", b"\xe2\x96", b"ab"), []), (packed(b"a", b"b", b"ab"), [0, 1, 3]),
    (b"\xff" * 40, []),
])  # fmt: skip
def test_what_does_not_fit_together_is_refused(library: ctypes.CDLL, texts: bytes, merges: list[int]) -> None:
    def opened(texts: bytes, merges: list[int]) -> object:
        return open_merger(library, texts=texts, types=bytes([NORMAL] * 3), merges=array("I", merges), unknown=None,
                           byte_fallback=False, space_prefix=False)  # fmt: skip

    assert opened(texts, merges) is None
    assert opened(packed(b"a", b"b", b"ab"), [0, 1, 2]) is not None


@pytest.mark.demo
def test_the_demo_model_is_merged_like_tokenizers_merges_it(library: ctypes.CDLL, demo_model: Path, tmp_path: Path) -> None:
    from astrai_runtime.weights._open import open_checkpoint

    checkpoint = open_checkpoint(demo_model)
    cache = MergeCache(tmp_path)
    plain = from_gguf(checkpoint.metadata, cache=cache)
    native = from_gguf(checkpoint.metadata, cache=cache, library=library)
    checkpoint.close()
    assert isinstance(native._codec, MergerCodec)
    assert native.fingerprint() == plain.fingerprint()
    control = list(plain.special_tokens)[:40]
    glue = ["", "\n", "   ", *control[:3], "<start_of_turn>"]
    texts = [first + between + second for between in glue for first in TEXTS for second in (*TEXTS[::4], *control[::8])]
    for text in texts:
        for special in (False, True):
            assert native.encode(text, special=special) == plain.encode(text, special=special), text
    for at in range(0, plain.vocab_size, 7):
        assert native.token_bytes(at) == plain.token_bytes(at)
