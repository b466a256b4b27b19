"""The pre-tokenizers that `tokenizer.ggml.pre` names: how text is cut before byte-level BPE merges.

Where a tag stands for one published tokenizer.json, the steps equal that file's; the others equal llama.cpp's. Every
step isolates its matches and keeps what lies between them, which is what both implementations do.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from astrai_runtime.errors import WeightsError, did_you_mean

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS.replace("DIGITS", r"\p{N}{1,3}")
_QWEN2 = _WORDS.replace("DIGITS", r"\p{N}")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_OPEN = r"[^\r\n\p{L}\p{N}]?"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = rf"{_OPEN}{_UPPER}*{_LOWER}+|{_OPEN}{_UPPER}+{_LOWER}*|\p{{N}}|{_TAIL}"
_GPT4O = rf"{_OPEN}{_UPPER}*{_LOWER}+{_CONTRACTION}|{_OPEN}{_UPPER}+{_LOWER}*{_CONTRACTION}|\p{{N}}{{1,3}}|{_TAIL}"
_CJK_DEEPSEEK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# cased letters, as deepseek-llm's tokenizer.json lists them; escaped, because some normalise to others
_LETTERS_DEEPSEEK = (
    r"\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
    "]+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreSplit:
    """One way to cut text.

    `steps`: regular expressions, applied in turn to the pieces of the step before. `nfc`: the model's own tokenizer
    composes characters first. `whole_words`: a piece that is itself a token is taken before any merge
    (`ignore_merges`). `add_bos`: raw text begins with BOS unless the file says otherwise.
    """

    steps: tuple[str, ...]
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The cut, followed by GPT-2's spelling of bytes as characters."""
        split = [pre_tokenizers.Split(Regex(step), "isolated") for step in self.steps]
        return pre_tokenizers.Sequence([*split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.nfc else None


_KINDS: tuple[tuple[PreSplit, tuple[str, ...]], ...] = (
    (PreSplit((_GPT2,)), ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "jina-es", "jina-de", "roberta-bpe")),
    (
        PreSplit((_LLAMA3,), whole_words=True, add_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    ),
    (PreSplit((_LLAMA3,)), ("dbrx", "smaug-bpe", "chatglm-bpe")),
    (PreSplit((_QWEN2,), nfc=True), ("qwen2",)),
    (PreSplit((_QWEN2,)), ("deepseek-r1-qwen", "stablelm2", "megrez")),
    (
        PreSplit((r"\p{N}", _GPT2)),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    (PreSplit((_TEKKEN,), whole_words=True, add_bos=True), ("tekken",)),
    (PreSplit((_GPT4O,)), ("gpt-4o", "llama4")),
    (
        PreSplit(("[\r\n]", _LETTERS_DEEPSEEK, r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", _CJK_DEEPSEEK, r"\p{N}+")),
        ("deepseek-llm",),
    ),
    (PreSplit(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_DEEPSEEK, r"\p{N}")), ("deepseek-coder",)),
    (PreSplit((r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u30ff]+", _DEEPSEEK3)), ("deepseek-v3",)),
    (PreSplit((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), ("falcon",)),
    (PreSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), ("default",)),
)


def known() -> dict[str, PreSplit]:
    """Every tag that is understood."""
    return {tag: kind for kind, tags in _KINDS for tag in tags}


def presplit(tag: object) -> PreSplit:
    """The pre-tokenizer that a GGUF file names.

    Raises:
        WeightsError: the tag is missing or not known. A wrong cut degrades every answer without a trace, so there is
            no default.
    """
    there = known()
    if isinstance(tag, str) and tag in there:
        return there[tag]
    names = ", ".join(sorted(there))
    if tag is None:
        raise WeightsError(
            "tokenizer.ggml.pre is missing, so it is unknown how this vocabulary cuts text; "
            f"convert the model again with a current converter. Known are: {names}"
        )
    near = did_you_mean(tag, there) if isinstance(tag, str) else ""
    raise WeightsError(f"no pre-tokenizer named {tag!r} (tokenizer.ggml.pre); there are: {names}{near}")
