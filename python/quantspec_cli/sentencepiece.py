"""SentencePiece vocabularies, from tokenizer.model and from GGUF files, as tokenizers of the `tokenizers` library.

tokenizer.model is a protobuf message (`sentencepiece_model.proto` of google/sentencepiece). Llama 2, Mistral 7B and
derived models use its BPE kind. The message is parsed here, as only ten of its fields are needed.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from . import files
from .errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import tokenizers

HINT = "use the tokenizer.model published with these weights"

_BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES = {_FIXED64: 8, _FIXED32: 4}


class Kind(IntEnum):
    """Kinds of tokens, numbered as in tokenizer.model and GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id.

    Attributes:
        error: makes an error about the vocabulary's file.
        tokens: their texts.
        kinds: a `Kind` per token.
    """

    error: Callable[[str], ModelError]
    tokens: list[str]
    kinds: list[int]

    def ids(self) -> dict[str, int]:
        """Ids of all tokens. Unused tokens pad the embedding and have no text."""
        ids: dict[str, int] = {}
        for id, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind != Kind.UNUSED and ids.setdefault(token, id) != id:
                raise self.error(f"has the token {token!r:.60} twice, as {ids[token]} and {id}")
        return ids

    def of(self, *kinds: Kind) -> list[str]:
        """Tokens of these kinds that have a text."""
        return [token for token, kind in zip(self.tokens, self.kinds, strict=True) if kind in kinds and token]

    def add_to(self, inner: tokenizers.Tokenizer, *, spaces: bool = False) -> None:
        """Adds tokens that are matched in a text before all others. With `spaces` a ▁ in them matches a space, as in Gemma's
        tokens for runs of spaces; that requires a tokenizer that puts none before a text.
        """
        from tokenizers import AddedToken

        def added(*kinds: Kind, special: bool) -> list[AddedToken]:
            tokens = self.of(*kinds)
            return [AddedToken(token, special=special, normalized=spaces and "▁" in token) for token in tokens]

        inner.add_special_tokens(added(Kind.UNKNOWN, Kind.CONTROL, special=True))
        inner.add_tokens(added(Kind.USER_DEFINED, special=False))


def byte_of(token: str) -> bytes | None:
    """The byte of a token such as <0x0A>; None for other tokens."""
    if len(token) == len("<0x00>") and token.startswith("<0x") and token.endswith(">"):
        with suppress(ValueError):
            return bytes([int(token[3:5], 16)])
    return None


def bpe(
    vocabulary: Vocabulary,
    scores: list[float],
    *,
    add_prefix: bool,
    squeeze: bool = False,
    charsmap: bytes = b"",
) -> tokenizers.Tokenizer:
    """A tokenizer like Llama 2's, without the tokens of `Vocabulary.add_to`.

    `add_prefix` puts a space before a text, `squeeze` drops repeated and outer spaces. `charsmap` is the compiled
    character normalisation of a SentencePiece model.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    tokens, kinds = vocabulary.tokens, vocabulary.kinds
    if len(tokens) != len(scores):
        raise vocabulary.error(f"has {len(tokens)} tokens and {len(scores)} scores")
    ids = vocabulary.ids()
    unknown = next(iter(vocabulary.of(Kind.UNKNOWN)), None)
    if unknown is None and kinds.count(Kind.BYTE) < 256:
        raise vocabulary.error(f"has no unknown token and {kinds.count(Kind.BYTE)} of 256 bytes")
    pieces = [id for id, kind in enumerate(kinds) if kind == Kind.NORMAL]
    inner = Tokenizer(
        BPE(
            vocab=ids,
            merges=_merges(tokens, pieces, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=Kind.BYTE in kinds,
        )
    )
    steps: list[Any] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if squeeze:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if add_prefix:
        steps.append(normalizers.Prepend("▁"))
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    decoder: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*decoder, decoders.Strip(" ", 1, 0)] if add_prefix else decoder)
    return inner


def _merges(tokens: list[str], pieces: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every pair of pieces that forms a piece, best score first: SentencePiece's order of merges."""
    known = {tokens[id] for id in pieces}
    # Slicing at every cut would take quadratic time for a token of 10⁵ characters.
    lengths = set(map(len, known))
    merges = []
    for id in sorted(pieces, key=lambda id: -scores[id]):
        piece = tokens[id]
        cuts = (cut for cut in range(1, len(piece)) if cut in lengths and len(piece) - cut in lengths)
        halves = ((piece[:cut], piece[cut:]) for cut in cuts)
        merges += [pair for pair in halves if pair[0] in known and pair[1] in known]
    return merges


def end_with(inner: tokenizers.Tokenizer, token: str, id: int) -> None:
    """Adds a token to the end of every text."""
    from tokenizers.processors import TemplateProcessing

    inner.post_processor = TemplateProcessing(single=["$A", token], special_tokens=[(token, id)])


@dataclass
class _Model:
    """The needed fields of a tokenizer.model, with the message's defaults."""

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    algorithm: int = 1
    bos: int = 1
    eos: int = 2
    charsmap: bytes = b""
    add_prefix: bool = True
    squeeze: bool = True


def load(path: Path, config: dict[str, Any], added: dict[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer of a tokenizer.model, and tokenizer_config.json with the model's BOS and EOS added.

    `config` is tokenizer_config.json, whose `added_tokens_decoder` extends the vocabulary; `added` is added_tokens.json,
    which older checkpoints have instead. Texts begin with BOS unless `add_bos_token` is false, as in Hugging Face's Llama
    tokenizer.
    """

    def error(what: str) -> ModelError:
        return ModelError(f"{path} {what}", HINT)

    try:
        model = _parse(files.read(path))
    except (ValueError, UnicodeDecodeError) as damage:
        raise error(f"is damaged: {damage}") from damage
    if model.algorithm != _BPE:
        raise ModelError(
            f"{path} has a tokenizer of type {model.algorithm}",
            f"supported is type {_BPE}, the BPE of Llama and Mistral",
        )
    vocabulary = Vocabulary(error, model.tokens, model.kinds)
    inner = bpe(vocabulary, model.scores, add_prefix=model.add_prefix, squeeze=model.squeeze, charsmap=model.charsmap)
    vocabulary.add_to(inner, spaces=not model.add_prefix)
    _extend(inner, config, added, error)
    config = dict(config)
    for name, id in {"bos_token": model.bos, "eos_token": model.eos}.items():
        if id in range(len(model.tokens)):
            config.setdefault(name, model.tokens[id])
    if config.get("add_bos_token") is None:
        config["add_bos_token"] = "bos_token" in config
    if config.get("add_eos_token") is True:
        eos = config.get("eos_token")
        text = eos.get("content") if isinstance(eos, dict) else eos
        known = inner.token_to_id(text) if isinstance(text, str) else None
        if known is None:
            raise error(f"has no token {text!r:.60}, the EOS that add_eos_token requires")
        end_with(inner, str(text), known)
    return inner, config


def _extend(
    inner: tokenizers.Tokenizer, config: dict[str, Any], added: dict[str, Any], error: Callable[[str], ModelError]
) -> None:
    """Adds a checkpoint's tokens beyond those of its tokenizer.model."""
    from tokenizers import AddedToken

    extra: dict[int, tuple[Any, bool]] = {}
    for text, id in added.items():
        extra[id if type(id) is int else -1] = (text, True)
    listed = config.get("added_tokens_decoder") or {}
    for id, token in listed.items() if isinstance(listed, dict) else ():
        content, special = (
            (token.get("content"), token.get("special", False)) if isinstance(token, dict) else (None, False)
        )
        extra[int(id) if id.isdecimal() else -1] = (content, bool(special))
    for id, (text, special) in sorted(extra.items()):
        if not isinstance(text, str) or not text or id < 0:
            raise error(f"goes with a list of added tokens in which {text!r:.60} has no id")
        token = AddedToken(text, special=special, normalized=False)
        (inner.add_special_tokens if special else inner.add_tokens)([token])
        if inner.token_to_id(text) != id:
            raise error(f"has {inner.get_vocab_size()} tokens, and the added token {text!r:.60} has the id {id}")


def _parse(data: bytes) -> _Model:
    """Parses the message.

    Raises:
        ValueError: it is cut off, or a field has another type.
    """
    model = _Model()
    for number, value in _fields(data):
        match number:
            case 1:
                _parse_piece(_bytes(value), model)
            case 2:
                numbers = {number: value for number, value in _fields(_bytes(value)) if number in {3, 41, 42}}
                # Ids are int32; −1, which disables a token, takes ten bytes.
                model.algorithm = _integer(numbers.get(3, model.algorithm))
                model.bos = _integer(numbers.get(41, model.bos))
                model.eos = _integer(numbers.get(42, model.eos))
            case 3:
                spec = {number: value for number, value in _fields(_bytes(value)) if number in {2, 3, 4}}
                model.charsmap = _bytes(spec.get(2, b""))
                model.add_prefix = bool(_integer(spec.get(3, 1)))
                model.squeeze = bool(_integer(spec.get(4, 1)))
            case _:
                pass
    if not model.tokens:
        raise ValueError("it holds no tokens")
    return model


def _parse_piece(data: bytes, model: _Model) -> None:
    text, score, kind = "", 0.0, int(Kind.NORMAL)
    for number, value in _fields(data):
        match number:
            case 1:
                text = _bytes(value).decode()
            case 2:
                (score,) = struct.unpack("<f", _bytes(value))
            case 3:
                kind = _integer(value)
            case _:
                pass
    model.tokens.append(text)
    model.scores.append(score)
    model.kinds.append(kind)


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a message's fields, in order; fixed-size numbers as their bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in _FIXED_SIZES:
            size = _FIXED_SIZES[wire]
        else:
            raise ValueError(f"field {number} has the wire type {wire}")
        if size > len(data) - at:
            raise ValueError(f"field {number} has {size} bytes where {len(data) - at} are left")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A base-128 number of at most ten bytes, and where it ends."""
    value = 0
    for index in range(10):
        if at + index >= len(data):
            raise ValueError("it ends within a number")
        byte = data[at + index]
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError("a number has more than ten bytes")


def _bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError("a field is a number instead of bytes")  # noqa: TRY004 - the file is wrong, not a call
    return value


def _integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("a field is bytes instead of a number")  # noqa: TRY004
    return value - (1 << 64) if value >= 1 << 63 else value
