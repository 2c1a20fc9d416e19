"""Texts encoded in pieces have the ids of the whole text, and known pieces are not encoded."""

from __future__ import annotations

import gzip
import threading
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from conftest import DEMO
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Inner

from quantspec_cli import gguf, pieces
from quantspec_cli.bench import grid
from quantspec_cli.lower_bound import SPACE
from quantspec_cli.tokenizer import Tokenizer

BOOK = gzip.decompress(grid.BOOK.read_bytes()).decode()
# Words, marks and white space around every kind of border.
FRAGMENTS = [
    "\n",
    "\n\n",
    "\r\n",
    "\n \n",
    " ",
    "  ",
    "\t",
    "\u00a0",
    "\u2028",
    "a",
    "It's",
    "1",
    "2345",
    "_x",
    "/",
    "//",
]
FRAGMENTS += [
    "'s",
    "\n's",
    "?",
    ".\n",
    "!\n/",
    ")\n\n",
    "e\u0301",
    "\u0301",
    "\u4e16\u754c\u3002",
    "\u0e01",
    SPACE,
    "<s>",
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.characters(exclude_categories=["Cs"]), max_size=40).map("".join)
# Lists of rules in which no rule covers white space.
WITHOUT_WORDS = {"deepseek-coder", "viking"}


def trained(kind: str) -> Any:
    """A model with merges across words and lines, of bytes or of characters with byte fallback."""
    paragraphs = [BOOK[at : at + 400].replace("\n\n", "\n\n\n") for at in range(0, 80_000, 400)]
    if kind == "bytes":
        inner = Inner(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        special = ["<s>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        inner = Inner(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        alphabet = []
        paragraphs = [paragraph.replace(" ", SPACE) for paragraph in paragraphs]
        if kind == "lines":
            paragraphs = [line for paragraph in paragraphs for line in paragraph.splitlines()]
    inner.train_from_iterator(
        paragraphs, trainers.BpeTrainer(vocab_size=1500, special_tokens=special, initial_alphabet=alphabet)
    )
    return inner.model


@cache
def model(kind: str) -> Any:
    return trained(kind)


def byte_level(*splits: Any) -> Inner:
    inner = Inner(model("bytes"))
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<s>"])
    inner.post_processor = processors.TemplateProcessing(single="<s> $A <s>", special_tokens=[("<s>", 0)])
    return inner


def by_rules(name: str) -> Inner:
    return byte_level(*(pre_tokenizers.Split(Regex(rule), "isolated") for rule in gguf.SPLITS[name]))


def sentencepiece(kind: str, *, metaspace: bool = False) -> Inner:
    inner = Inner(model(kind))
    if metaspace:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    inner.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    inner.add_special_tokens(["<s>"])
    return inner


RULES = {rules: name for name, rules in gguf.SPLITS.items()}.values()
KINDS: dict[str, Any] = {name: (lambda name=name: by_rules(name)) for name in RULES if name not in WITHOUT_WORDS}
KINDS |= {
    "demo": lambda: Inner.from_file(str(DEMO / "tokenizer.json")),
    "sentencepiece": lambda: sentencepiece("lines"),
    "metaspace": lambda: sentencepiece("lines", metaspace=True),
}


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return opened(KINDS[kind]())


def opened(inner: Inner) -> Tokenizer:
    with TemporaryDirectory() as folder:
        inner.save(f"{folder}/tokenizer.json")
        return Tokenizer(Path(folder), inner.get_vocab_size())


def whole(tokenizer: Tokenizer, text: str, *, special: bool) -> list[int]:
    return list(tokenizer._inner.encode(text, add_special_tokens=special).ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, special=st.booleans())
@example(text="One.\n\nTwo.\n\n \nThree.\r\n\r\nFour!\n/five\n_six\n7\n\n'8", special=True)
@example(text=BOOK[:20_000].replace("\n\n", "\n\n\n"), special=True)
def test_the_ids_are_those_of_the_whole_text(kind: str, text: str, special: bool) -> None:
    tokenizer = tokenizer_of(kind)
    assert pieces.are_independent(tokenizer._inner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "LEAST_CHARACTERS", 1)
        for _ in range(2):  # not kept, and kept
            assert tokenizer.encode(text, special=special) == whole(tokenizer, text, special=special)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", ["/s>ends here.", "s>\nNext", " spaced", "\nline\n", "\n\n", "", BOOK[:3000]])
def test_the_rest_of_a_text_has_no_space_of_its_own(kind: str, rest: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("The tag<", special=False) + tokenizer.encode_rest([rest])[0]
    decoded = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert decoded.removeprefix(" ") == f"The tag<{rest}"


def with_token(**options: Any) -> Inner:
    inner = by_rules("llama3")
    inner.add_tokens([AddedToken(**options)])
    return inner


DEPENDENT: dict[str, Any] = {
    "no rule for words": byte_level,
    **{name: (lambda name=name: by_rules(name)) for name in sorted(WITHOUT_WORDS)},
    "a rule across lines": lambda: byte_level(pre_tokenizers.Split(Regex(r"\w+\s*|[^\w]\s+|\s+"), "isolated")),
    "merges across lines": lambda: sentencepiece("characters"),
    "a token across lines": lambda: with_token(content="o.\nT"),
    "a token with a line break": lambda: with_token(content="o.\n"),
    "a token that absorbs the space before it": lambda: with_token(content="T", lstrip=True),
    "a token that absorbs the space after it": lambda: with_token(content="o.", rstrip=True),
    "a normaliser of white space": lambda: normalised(normalizers.Replace("\n\n", " ")),
}


def normalised(step: Any) -> Inner:
    inner = by_rules("llama3")
    inner.normalizer = step
    return inner


@pytest.mark.parametrize("kind", DEPENDENT)
def test_a_tokenizer_with_tokens_across_pieces_encodes_the_whole_text(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LEAST_CHARACTERS", 1)
    tokenizer = opened(DEPENDENT[kind]())
    text = "It is so.\nThe end.\n\nSo so.\nThen no more.\n\n" * 3 + BOOK[:5000]
    assert tokenizer.encode(text) == whole(tokenizer, text, special=True)
    assert not pieces.are_independent(tokenizer._inner)


class Spy:
    """A tokenizer that records what is encoded."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.characters: list[int] = []

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.characters.append(sum(map(len, texts)))
        return self.inner.encode_batch_fast(texts, **options)


@pytest.fixture
def spied() -> tuple[Tokenizer, Spy]:
    tokenizer = Tokenizer(DEMO, 8192)
    tokenizer.encode(BOOK[:5000])
    spy = Spy(tokenizer._inner)
    tokenizer._inner = spy  # type: ignore[assignment]
    return tokenizer, spy


def test_a_second_question_encodes_the_end_of_its_prompt(spied: tuple[Tokenizer, Spy]) -> None:
    tokenizer, spy = spied
    document = BOOK[100_000:300_000]
    first, second = (f"{document}\n\n{question}" for question in ("Who tells the story?", "When?"))
    tokenizer.encode(first)
    assert sum(spy.characters) >= len(first)
    spy.characters.clear()
    assert tokenizer.encode(second) == whole(Tokenizer(DEMO, 8192), second, special=True)
    assert sum(spy.characters) < 10_000
    spy.characters.clear()
    tokenizer.encode_all([first, second])
    assert not spy.characters


def test_no_more_characters_are_kept_than_the_limit(
    spied: tuple[Tokenizer, Spy], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, spy = spied
    monkeypatch.setattr(pieces, "KEPT_CHARACTERS", 30_000)
    kept = tokenizer._kept._ids
    parts = [BOOK[at : at + 10_000] for at in range(100_000, 200_000, 10_000)]
    for part in parts:
        tokenizer.encode(part)
        assert sum(map(len, kept)) == tokenizer._kept._characters <= 30_000
    spy.characters.clear()
    tokenizer.encode(parts[-1])
    assert not spy.characters, "the newest stays"
    tokenizer.encode(parts[0])
    assert sum(spy.characters) >= len(parts[0]), "the oldest was removed"
    tokenizer.encode(BOOK[200_000:300_000])
    assert sum(map(len, kept)) <= 30_000


def test_threads_share_pieces(spied: tuple[Tokenizer, Spy], monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, _ = spied
    monkeypatch.setattr(pieces, "KEPT_CHARACTERS", 20_000)
    texts = [BOOK[at : at + 15_000] for at in range(0, 60_000, 3000)]
    plain = Tokenizer(DEMO, 8192)
    wanted = [whole(plain, text, special=True) for text in texts]
    found: dict[int, list[list[int]]] = {}

    def encode(thread: int) -> None:
        found[thread] = [tokenizer.encode(text) for text in texts]

    threads = [threading.Thread(target=encode, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(found.values()) == [wanted] * 4
    assert tokenizer._kept._characters == sum(map(len, tokenizer._kept._ids))
