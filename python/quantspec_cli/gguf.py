"""GGUF files: the models in a set of file names, and the tokenizer in a file's metadata.

The native module reads weights and the network's configuration (`quantspec-model/src/gguf.rs`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

from . import sentencepiece
from .errors import ModelError, native_errors
from .sentencepiece import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import tokenizers

    T = TypeVar("T")

SUFFIX = ".gguf"
HINT = "fetch the file again, or use another file of this model"

# Metadata that a tokenizer is made of. A damaged file may have any other, of any size.
_KEYS = [
    "tokenizer.chat_template",
    *(f"tokenizer.ggml.{name}" for name in ("model", "pre", "tokens", "token_type", "scores", "merges")),
    *(f"tokenizer.ggml.{name}" for name in ("add_space_prefix", "add_bos_token", "add_eos_token")),
    *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown", "padding")),
]

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENGLISH}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENGLISH}|{_WORDS}|\p{{N}}|{_REST}"
_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_SENTENCE = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"

# How byte-level tokenizers split a text into words, by tokenizer.ggml.pre: each rule splits what the rules before it left. A
# match is a word, and so is the text between two matches.
_RULES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("default",): (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ("gpt-2", "olmo", "mellum", "gigachat", "a.x-4.0", "trillion"): (_GPT2,),
    ("smollm", "refact", "starcoder", "minerva-7b"): (r"\p{N}", _GPT2),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe"): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "megrez", "kormo", "f2llmv2"): (_QWEN2,),
    ("tekken",): (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}",),
    ("gpt-4o", "llama4", "kanana2"): (rf"{_CASED[0]}{_ENGLISH}?|{_CASED[1]}{_ENGLISH}?|\p{{N}}{{1,3}}|{_CASED_REST}",),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, r"\p{N}"),
    ("deepseek-v3",): (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    ("seed-coder",): (rf"{_ENGLISH}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    ("viking",): (_SENTENCE, r"\p{N}"),
}
SPLITS = {name: rules for names, rules in _RULES.items() for name in names}
# These keep a word that is a token whole, and begin every text with BOS unless the file says otherwise.
_WHOLE_WORDS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken"}
# The published tokenizer of these composes characters before it splits.
_COMPOSES = {"qwen2"}
# Texts of tokens that end an answer. Many files of instruct models name one of several, or only that of base models.
ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


def models(names: Iterable[str]) -> list[str]:
    """The models among file names, each by its only or first file, which may itself be missing; projectors and quantisers'
    statistics are excluded.
    """
    found = set()
    for name in names:
        base = name.rpartition("/")[2].lower()
        if base.endswith(SUFFIX) and "mmproj" not in base and "imatrix" not in base:
            found.add(parts(name)[0])
    return sorted(found)


def parts(name: str) -> list[str]:
    """All files of a model, given one of them."""
    part = _PART.search(name)
    if part is None or not 1 <= int(part[1]) <= int(part[2]):
        return [name]
    return [f"{name[: part.start()]}-{number:05}-of-{part[2]}{SUFFIX}" for number in range(1, int(part[2]) + 1)]


def load_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A file's tokenizer, and its metadata in the form of tokenizer_config.json."""
    from . import _native

    with native_errors():
        fields = _Fields(path, _native.gguf_metadata(str(path), _KEYS))
    kind = fields.text("tokenizer.ggml.model")
    tokens, types = fields.list("tokenizer.ggml.tokens", str), fields.list("tokenizer.ggml.token_type", int)
    if len(tokens) != len(types):
        raise fields.error(f"has {len(tokens)} tokens and {len(types)} types of tokens")
    vocabulary = Vocabulary(fields.error, tokens, types)
    if kind == "gpt2":
        inner, begins = _byte_level(fields, vocabulary)
        prefix = True
    elif kind == "llama":
        prefix = fields.optional("tokenizer.ggml.add_space_prefix", bool) is not False
        inner = sentencepiece.bpe(vocabulary, fields.list("tokenizer.ggml.scores", float), add_prefix=prefix)
        begins = True
    else:
        raise ModelError(f"{path} has a tokenizer of kind {kind}", "supported kinds are gpt2 and llama (SentencePiece)")
    vocabulary.add_to(inner, spaces=not prefix)
    config: dict[str, Any] = {"chat_template": fields.optional("tokenizer.chat_template", str)}
    for field, name in {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}.items():
        id = fields.optional(f"tokenizer.ggml.{field}_token_id", int)
        if id is not None:
            if id not in range(len(tokens)):
                raise fields.error(f"has metadata tokenizer.ggml.{field}_token_id {id} and {len(tokens)} tokens")
            config[f"{name}_token"] = tokens[id]
    config["add_bos_token"] = _adds(fields, config, "bos", default=begins and "bos_token" in config)
    if _adds(fields, config, "eos", default=False):
        eos = config["eos_token"]
        sentencepiece.end_with(inner, eos, tokens.index(eos))
    return inner, config


class _Fields:
    """Typed access to metadata."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self._path = path
        self._values = values

    def error(self, what: str) -> ModelError:
        return ModelError(f"{self._path} {what}", HINT)

    def optional(self, key: str, kind: type[T]) -> T | None:
        value = self._values.get(key)
        if value is not None and type(value) is not kind:
            raise self.error(f"has metadata {key} that is not of type {kind.__name__}")
        return value

    def text(self, key: str) -> str:
        value = self.optional(key, str)
        if value is None:
            raise self.error(f"has no metadata {key}")
        return value

    def list(self, key: str, kind: type[T]) -> list[T]:
        values = self._values.get(key)
        if values is None:
            raise self.error(f"has no metadata {key}")
        if not isinstance(values, list) or any(type(value) is not kind for value in values):
            raise self.error(f"has metadata {key} that is not a list of type {kind.__name__}")
        return values


def _adds(fields: _Fields, config: dict[str, Any], name: str, *, default: bool) -> bool:
    """Whether every text gets the token."""
    stated = fields.optional(f"tokenizer.ggml.add_{name}_token", bool)
    if stated and f"{name}_token" not in config:
        raise fields.error(f"has metadata tokenizer.ggml.add_{name}_token and no {name.upper()}")
    return default if stated is None else stated


def _byte_level(fields: _Fields, vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """A tokenizer like GPT-2's, and whether it begins texts with BOS."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    name = fields.text("tokenizer.ggml.pre")
    if name not in SPLITS:
        raise ModelError(
            f"the tokenizer has the pre-tokenizer {name!r:.60} (tokenizer.ggml.pre), which is not supported",
            f"supported are {', '.join(SPLITS)}; use the safetensors checkpoint of this model",
        )
    merges = []
    for text in fields.list("tokenizer.ggml.merges", str):
        # A piece may have a space only at its start.
        cut = text.find(" ", 1)
        if cut < 0:
            raise fields.error(f"has the merge {text!r:.60} of one piece")
        merges.append((text[:cut], text[cut + 1 :]))
    whole = name in _WHOLE_WORDS
    inner = Tokenizer(BPE(vocab=vocabulary.ids(), merges=merges, ignore_merges=whole))
    splits = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in SPLITS[name]]
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if name in _COMPOSES:
        inner.normalizer = normalizers.NFC()
    inner.decoder = decoders.ByteLevel()
    return inner, whole
