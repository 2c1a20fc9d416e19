"""A model's tokenizer: text to ids with its own special tokens, ids to bytes."""

from __future__ import annotations

import json
import re
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

from . import background, files, gguf, lower_bound, panics, pieces, sentencepiece
from .errors import ModelError, QuantspecError, no_thread
from .prompts import check_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    import tokenizers


_HINT = "use the tokenizer.json published with these weights"
_SUPPORTED = "supported are byte-level and SentencePiece tokenizers (BPE), as the supported model families have"

# With a prefix, the library joins tokens by bytes. If that cuts a character, it aborts the process.
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*("[^"]+")')


class Tokenizer:
    """The tokenizer of a checkpoint directory, or of a GGUF file.

    Attributes:
        config: tokenizer_config.json, with special tokens of special_tokens_map.json that it lacks; {} if there is none;
            the same fields of a GGUF file.
        special: text of the special tokens a chat template may name: bos_token, eos_token and the like.
    """

    def __init__(self, model: Path, vocab: int) -> None:
        """Reads a directory's tokenizer.json or tokenizer.model, or a GGUF file; `vocab` is the number of rows of the
        model's embedding.
        """
        if files.is_file(model):
            self._name, self._hint = str(model), gguf.HINT
            self._inner, self.config = _guarded(
                lambda: gguf.load_tokenizer(model), f"the tokenizer of {model} cannot be read", self._hint
            )
        else:
            self._name, self._hint = str(model / "tokenizer.json"), _HINT
            self.config = _with_special_tokens(read_json(model / "tokenizer_config.json"), model)
            file = model / "tokenizer.model"
            if not files.is_file(model / "tokenizer.json") and files.is_file(file):
                self._name, self._hint = str(file), sentencepiece.HINT
                added = read_json(model / "added_tokens.json")
                self._inner, self.config = panics.hidden(
                    lambda: _guarded(
                        lambda: sentencepiece.load(file, self.config, added), f"{file} cannot be read", self._hint
                    )
                )
            else:
                self._inner = _load(model)
        self.special = {key: text for key, value in self.config.items() if (text := _special(key, value)) is not None}
        self._vocab = vocab
        known = self._inner.get_vocab_size(with_added_tokens=True)
        # Embeddings are padded to a round number of rows, but never doubled.
        if known * 2 < vocab:
            raise ModelError(
                f"{self._name} has {known} tokens, the model has {vocab}",
                self._hint,
            )
        self._bos = self._configured_bos()
        self._hidden = {id for id, token in self._inner.get_added_tokens_decoder().items() if token.special}
        self._to_bytes, self._strips_start = _byte_rule(self._inner, self._name)
        self._bytes: dict[int, bytes] = {}
        self._kept = pieces.Kept()

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of a text. `special` adds the tokenizer's tokens around a text (its BOS), exactly once.

        Text rendered by a chat template contains its special tokens and is encoded with `special=False`.
        """
        check_text("the text", text)
        return self.encode_all([text], special=special)[0]

    def encode_all(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """`encode` of each text. Several texts, and the pieces of a long one, are encoded on all processors."""
        parts = [self._parts(text) for text in texts]
        short = [part for part, *rest in parts if not rest]
        whole = iter(self._encode(short, special=special) if short else ())
        found = self._kept.ids(
            [part for of in parts if len(of) > 1 for part in of], partial(self._encode, special=False)
        )
        ids = [self._joined(of, found, special=special) if len(of) > 1 else next(whole) for of in parts]
        return [self._with_bos(one) for one in ids] if special and self._bos is not None else ids

    def encode_rest(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that continue others: without the space that some tokenizers put before a text."""
        if not texts:
            return []
        begin, *found = self.encode_all([pieces.BEFORE, *(pieces.BEFORE + text for text in texts)], special=False)
        return [
            # Of tokenizers that join a line break with the text, the text alone.
            ids[len(begin) :] if ids[: len(begin)] == begin else self.encode(text, special=False)
            for text, ids in zip(texts, found, strict=True)
        ]

    def _parts(self, text: str) -> list[str]:
        """What is encoded of a text: the text, or its pieces."""
        if len(text) <= pieces.LEAST_CHARACTERS or not self._has_independent_pieces:
            return [text]
        return pieces.split(text)

    @cached_property
    def _has_independent_pieces(self) -> bool:
        return pieces.are_independent(self._inner)

    def _joined(self, parts: Sequence[str], found: Mapping[str, Sequence[int]], *, special: bool) -> list[int]:
        """The ids of a text from those of its pieces."""
        before, after, lead, trail = self._around
        last = len(parts) - 1
        ids = list(before) if special else []
        for place, part in enumerate(parts):
            of_part = found[part]
            ids += of_part[lead if place > 0 else 0 : len(of_part) - (trail if place < last else 0)]
        return ids + (after if special else [])

    @cached_property
    def _around(self) -> tuple[list[int], list[int], int, int]:
        """The tokenizer's ids before and after a text, and the numbers of ids before and after each piece."""
        texts = [pieces.BEFORE, pieces.BEFORE + pieces.AFTER]
        lead, plain = self._encode(texts, special=False)
        _, full = self._encode(texts, special=True)
        at = next(at for at in range(len(full)) if full[at : at + len(plain)] == plain)
        return full[:at], full[at + len(plain) :], len(lead), len(plain) - len(lead)

    def _encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """The library's ids of each text."""
        # The batch call releases the GIL. Its panics become errors on its own thread.
        what = f"{self._name} cannot encode the text"
        encode = partial(self._inner.encode_batch_fast, list(texts), add_special_tokens=special)
        encodings = panics.hidden(lambda: background.run(lambda: _guarded(encode, what, self._hint)))
        found = [list(encoding.ids) for encoding in encodings]
        self._check_ids(max((max(ids) for ids in found if ids), default=0))
        return found

    def _with_bos(self, ids: list[int]) -> list[int]:
        """The ids with the BOS of tokenizer_config.json, once."""
        if ids[:1] != [self._bos]:
            ids.insert(0, cast("int", self._bos))
        return ids

    def _check_ids(self, largest: int) -> None:
        """Refuses an id that the model does not have."""
        if largest >= self._vocab:
            raise ModelError(
                f"{self._name} produces token id {largest}, the model has {self._vocab} tokens", self._hint
            )

    def least_tokens(self, text: str, enough: int) -> int:
        """A lower bound of a text's token count, without encoding it. Counting stops at `enough`."""
        if self._lower_bound is not None:
            return self._lower_bound.tokens(text, enough)
        # Before a text is split into tokens, white space around it may be removed, and composing characters may shorten it
        # slightly, never by a factor of four.
        return len(text.strip().encode()) // (4 * self.longest_token_bytes)

    @cached_property
    def _lower_bound(self) -> lower_bound.LowerBound | None:
        return lower_bound.of(self._inner, _byte_level)

    def _configured_bos(self) -> int | None:
        """The id that begins every text according to tokenizer_config.json; None if it names none."""
        token = self.special.get("bos_token")
        if token is None or self.config.get("add_bos_token") is not True:
            return None
        bos = self.id_of(token)
        if bos is None:
            raise ModelError(
                f"{self._name} has no token {token!r}, the BOS of tokenizer_config.json",
                "use both files as they were published with these weights",
            )
        self._check_ids(bos)
        return bos

    def encode_start(self, text: str, count: int) -> list[int]:
        """The first `count` ids of `encode`, or all of a shorter text. Encoding takes 100 bytes of memory per byte, so only
        a sufficient beginning of a long text is encoded.
        """
        start = text[: 4 * count * self.longest_token_bytes]
        ids = self.encode(start)
        # A cut changes the ids near it. So few ids mean that they cover more text than tokens normally do, and the whole text
        # is encoded.
        if len(start) < len(text) and len(ids) < 2 * count:
            ids = self.encode(text)
        return ids[:count]

    def difference(self, other: Tokenizer) -> str | None:
        """The first difference in tokens or merges of two tokenizers, in words; None if their ids are equivalent."""
        mine, its = (one._inner.get_vocab(with_added_tokens=True) for one in (self, other))
        if mine != its:
            here, there = ({id: token for token, id in vocabulary.items()} for vocabulary in (mine, its))
            first = min(id for id in here.keys() | there.keys() if here.get(id) != there.get(id))
            return f"token {first} is {here.get(first)!r} here and {there.get(first)!r} there"
        rules, its_rules = (json.loads(one._inner.to_str())["model"].get("merges") or [] for one in (self, other))
        if rules != its_rules:
            return f"{len(rules)} and {len(its_rules)} merges, which are not the same"
        return None

    def id_of(self, token: str | None) -> int | None:
        """Id of a token; None if it is unknown."""
        found = self._inner.token_to_id(token) if token else None
        return None if found is None else int(found)

    @cached_property
    def control_tokens(self) -> list[str]:
        """Texts of the special tokens, which are encoded as such wherever a text has them."""
        return [self._inner.id_to_token(id) for id in self._hidden]

    @cached_property
    def longest_token_bytes(self) -> int:
        """Bytes of the longest token of the vocabulary."""
        return max(len(self._to_bytes(token)) for token in self._inner.get_vocab(with_added_tokens=True))

    def token_bytes(self, token: int) -> bytes:
        """UTF-8 bytes of a token, possibly part of a character; empty for special and padding tokens."""
        known = self._bytes.get(token)
        if known is None:
            text = None if token in self._hidden else self._inner.id_to_token(token)
            known = self._bytes[token] = b"" if text is None else self._to_bytes(text)
        return known

    def vocabulary(self) -> tuple[list[bytes], set[int]]:
        """Bytes of every token of the model's vocabulary by id (empty for unused ids; names for special tokens), and the ids
        of special tokens.
        """
        tokens = [b""] * self._vocab
        for name, id in self._inner.get_vocab(with_added_tokens=True).items():
            if id < self._vocab:
                tokens[id] = name.encode() if id in self._hidden else self.token_bytes(id)
        return tokens, self._hidden

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a short text without anything around it."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def answer_bytes(self, *, continues: bool, shown: Iterable[str] = ()) -> Callable[[int], bytes]:
        """`token_bytes` for one answer. Tokens of these texts are `shown`, even special ones.

        An answer that does not continue its prompt's text starts without the space SentencePiece puts before a word.
        """
        special = {id: text.encode() for text in shown if (id := self.id_of(text)) is not None and id in self._hidden}

        def token_bytes(token: int) -> bytes:
            return special.get(token) or self.token_bytes(token)

        if continues or not self._strips_start:
            return token_bytes if special else self.token_bytes
        started = False

        def first_stripped(token: int) -> bytes:
            nonlocal started
            known = token_bytes(token)
            if started or not known:
                return known
            started = True
            return known.removeprefix(b" ")

        return first_stripped


def _load(directory: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Inner
    from tokenizers import models

    path = directory / "tokenizer.json"
    if not files.is_file(path):
        hint = "copy the tokenizer.json published with these weights into the directory"
        if files.is_file(directory / "vocab.json"):
            hint = (
                "it has vocab.json; convert it: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR) of transformers"
            )
        elif files.is_file(directory / "tekken.json"):
            hint = "it has tekken.json, which is not read; take tokenizer.json from a copy of this model that has it"
        raise ModelError(f"{directory} has no tokenizer.json", hint)
    # Read here: the library's error for a file without permission does not name the reason.
    raw = files.read(path)
    if found := _PREFIX.search(raw):
        prefix = found[1].decode(errors="replace")
        raise ModelError(f"{path} has the continuing_subword_prefix {prefix:.60}", _SUPPORTED)
    # The library holds the GIL while it parses: 0.3 s for 150,000 tokens. So the command line calls this in `SIGNALS.ending`.
    inner: Inner = panics.hidden(lambda: _guarded(lambda: Inner.from_buffer(raw), f"{path} cannot be read", _HINT))
    # A tokenizer.json may request truncation or padding; both are disabled.
    inner.no_truncation()
    inner.no_padding()
    # It may also request random merges, as in training: disabled, so that the same prompt has the same ids.
    if isinstance(inner.model, models.BPE):
        inner.model.dropout = None
    return inner


def _guarded(work: Callable[[], Any], message: str, hint: str) -> Any:
    """Calls the tokenizer library, whose errors are bare exceptions and, for some damaged files, panics."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, MemoryError, QuantspecError):
        raise
    except BaseException as error:
        if "ThreadPoolBuildError" in str(error):
            raise no_thread() from error
        raise ModelError(f"{message}: {error}", hint) from error


def _byte_rule(inner: tokenizers.Tokenizer, name: str) -> tuple[Callable[[str], bytes], bool]:
    """How a token's text is converted to bytes, and whether a text loses its first space."""
    decoder = inner.decoder
    spec: dict[str, Any] = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
    steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = [step["type"] for step in steps]
    if "ByteLevel" in kinds:
        return _byte_level, False
    if decoder is None:
        return lambda token: b" " + token.encode(), True
    unknown = set(kinds) - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    unknown |= {"Replace (Regex)" for step in steps if step["type"] == "Replace" and "String" not in step["pattern"]}
    if unknown:
        raise ModelError(f"{name} has a decoder of type {', '.join(sorted(unknown))}", _SUPPORTED)
    replacements = [(step["replacement"], " ") for step in steps if step["type"] == "Metaspace"]
    replacements += [(step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"]
    fallback = "ByteFallback" in kinds
    strips = any(
        (step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in steps
    )

    def replaced(token: str) -> bytes:
        if fallback and (byte := sentencepiece.byte_of(token)) is not None:
            return byte
        for pattern, content in replacements:
            token = token.replace(pattern, content) if pattern else token
        return token.encode()

    return replaced, strips


def _byte_level(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        # An added token contains its text unchanged.
        return token.encode()


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, every other byte for the next code point from 256 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + index) for index, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF = {letter: byte for byte, letter in BYTE_ALPHABET.items()}


def _special(key: str, value: object) -> str | None:
    """The text of a special token in tokenizer_config.json: a string, or an object with its content."""
    if not key.endswith("_token"):
        return None
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _with_special_tokens(config: dict[str, Any], model: Path) -> dict[str, Any]:
    """tokenizer_config.json with the special tokens of special_tokens_map.json that it lacks. Old checkpoints have them there
    alone; newer ones list them in both, or all tokens in `added_tokens_decoder`.
    """
    if "added_tokens_decoder" in config:
        return config
    tokens = read_json(model / "special_tokens_map.json")
    return {key: value for key, value in tokens.items() if _special(key, value) is not None} | config


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a model's file; empty if the file does not exist."""
    if files.status(path) is None:
        return {}
    if not files.is_file(path):  # a pipe would be waited for
        raise ModelError(f"{path} is not a file", "use the file published with these weights")
    try:
        parsed = json.loads(files.read(path))
        # Half of a surrogate pair is valid JSON, but not valid text.
        json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ModelError(
            f"{path} holds {half} without the other half of the pair", "use the file published with these weights"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}", "use the file published with these weights") from error
    if not isinstance(parsed, dict):
        raise ModelError(f"{path} is not a JSON object", "use the file published with these weights")
    return parsed
