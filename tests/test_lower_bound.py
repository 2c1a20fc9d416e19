"""A lower bound never exceeds the number of tokens, and is close enough to avoid encoding a long prompt."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Inner

from quantspec_cli import lower_bound
from quantspec_cli.bench import grid
from quantspec_cli.tokenizer import Tokenizer, _byte_level

BOOK = gzip.decompress(grid.BOOK.read_bytes()).decode()
CHINESE = (
    "\u6211\u4eec\u5728\u591c\u91cc\u8d70\u8fc7\u4e86\u957f\u957f\u7684\u8def\uff0c\u6ca1\u6709\u4eba\u8bf4\u8bdd\u3002"
)
MIXED = "e\u0301 caf\u00e9 \u2581under\u2581 <s>\u0338 <mask>   \n\t x\u00a0 y \U0001f389 " + CHINESE
# A token of bytes that are adjacent in no other token. Its first character also occurs in byte-level vocabularies.
ADDED = "\u00e9qZ#"


def byte_level(splits: Any, normalizer: Any = None) -> Inner:
    """Merges across words, as no step splits the text."""
    inner = Inner(models.BPE(ignore_merges=True))
    inner.normalizer = normalizer
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = [line for line in BOOK[:60_000].splitlines() if line] + [MIXED] * 20
    inner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, special_tokens=["<s>"])
    )
    inner.add_tokens([ADDED])
    return inner


def sentencepiece(metaspace: bool) -> Inner:
    """Like Llama 2's, with merges across words."""
    corpus = [line.replace(" ", lower_bound.SPACE) for line in BOOK[:60_000].splitlines() if line] + [CHINESE] * 20
    trained = Inner(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trained.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=1500, special_tokens=["<unk>", "<s>", *fallback])
    )
    # The trainer marks the byte tokens as special, which they are not.
    inner = Inner(trained.model)
    if metaspace:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        space = lower_bound.SPACE
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    inner.add_special_tokens(["<s>"])
    inner.add_tokens([AddedToken(ADDED, normalized=True)])
    return inner


GPT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KINDS = {
    "demo": Inner.from_file(str(DEMO / "tokenizer.json")),
    "words": byte_level([pre_tokenizers.Split(Regex(GPT), "isolated")], normalizers.NFC()),
    "across words": byte_level([], normalizers.NFC()),
    "sentencepiece": sentencepiece(metaspace=False),
    "metaspace": sentencepiece(metaspace=True),
}

TEXTS = st.lists(
    st.sampled_from([*MIXED.split(), *BOOK[:2000].split(), " ", "\n", "  ", ADDED, "12345", "\u0338"]),
    max_size=60,
).map("".join) | st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


def counts(inner: Inner, text: str) -> tuple[int, int]:
    """The bound and the number of tokens."""
    bound = lower_bound.of(inner, _byte_level)
    assert bound is not None
    return bound.tokens(text, 1 << 60), len(inner.encode(text, add_special_tokens=False).ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@example(text=MIXED)
@example(text=ADDED * 20)
@example(text=f" {ADDED}" * 20)
@example(text=unicodedata.normalize("NFD", MIXED) * 10)
def test_a_text_has_no_fewer_tokens(kind: str, text: str) -> None:
    bound, tokens = counts(KINDS[kind], text)
    assert bound <= max(tokens, 1)  # an empty text has none


@pytest.mark.parametrize(
    ("kind", "share"), [("demo", 0.85), ("words", 0.6), ("across words", 0.25), ("metaspace", 0.25)]
)
def test_the_bound_is_close(kind: str, share: float) -> None:
    bound, tokens = counts(KINDS[kind], BOOK[:300_000])
    assert share * tokens <= bound <= tokens
    bound, tokens = counts(KINDS[kind], CHINESE * 1000)
    assert tokens / 20 <= bound <= tokens


def test_counting_ends_early() -> None:
    bound = lower_bound.of(KINDS["demo"], _byte_level)
    assert bound is not None
    assert 5000 <= bound.tokens(BOOK, 5000) < 20_000


def test_tokens_that_absorb_white_space_are_not_counted() -> None:
    inner = Inner.from_str(KINDS["demo"].to_str())
    inner.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    bound, tokens = counts(inner, "x" + " \t" * 1000 + "<mask>")
    assert (bound, tokens) == (0, 2)
    assert counts(inner, BOOK[:1000])[0] > 100


@pytest.mark.parametrize(
    "part",
    [
        {"normalizer": normalizers.StripAccents()},
        {"normalizer": normalizers.Replace("e", "")},
        {"pre_tokenizer": pre_tokenizers.Whitespace()},
        {"pre_tokenizer": pre_tokenizers.Split(" ", "removed")},
        {"model": models.WordLevel({"x": 0}, unk_token="x")},
        {"model": models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])},
    ],
    ids=lambda part: next(iter(part)),
)
def test_a_tokenizer_that_may_leave_out_text_has_no_bound(part: dict[str, Any]) -> None:
    inner = Inner.from_str(KINDS["demo"].to_str())
    for name, value in part.items():
        setattr(inner, name, value)
    assert lower_bound.of(inner, _byte_level) is None


@pytest.mark.parametrize("sentence", ["It was a dark and stormy night; the rain fell in torrents. ", CHINESE])
def test_a_prompt_far_beyond_the_context_takes_little_memory(sentence: str) -> None:
    program = (
        "import resource, sys\n"
        "def peak():\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "    return used if sys.platform == 'darwin' else used << 10\n"
        "import fake_native; fake_native.install()\n"
        "from quantspec_cli.model import Model\n"
        "from quantspec_cli.errors import DoesNotFitError\n"
        "model = Model.open(); model.prompt('some text')\n"
        "document = sys.argv[1] * (8_000_000 // len(sys.argv[1].encode()))\n"
        "before = peak()\n"
        "try: model.prompt(document, context=2048)\n"
        "except DoesNotFitError as error: print(peak() - before, error.message)\n"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program, sentence],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    taken, _, message = done.stdout.partition(" ")
    assert "more than 2048 tokens; the context is 2048" in message
    assert int(taken) < 150_000_000


def test_a_tokenizer_without_a_bound_goes_by_its_longest_token(tmp_path: Path) -> None:
    inner = Inner(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path, 3)
    assert tokenizer.longest_token_bytes == len(" <unk>")
    assert tokenizer.least_tokens("one two " * 300, 1) == 99
    assert tokenizer.least_tokens(" " * 10_000 + "one", 1) == 0, "white space around a text may have no tokens"
