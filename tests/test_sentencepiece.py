"""tokenizer.model: ids equal SentencePiece's, and unusable files are refused."""

from __future__ import annotations

import io
import itertools
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from conftest import Outcome, copy_demo, damaged
from hypothesis import given, settings
from hypothesis import strategies as st

from quantspec_cli.errors import ModelError
from quantspec_cli.sentencepiece import _merges
from quantspec_cli.tokenizer import Tokenizer

EXAMPLE = (Path(__file__).parent.parent / "examples" / "dracula.txt").read_text()
VOCAB = 600


def train(folder: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    """A BPE tokenizer made like Llama 2's, in a separate folder."""
    folder.mkdir()
    model = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "vocab_size": VOCAB,
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "num_threads": 1,
        "minloglevel": 2,
    }
    text = iter(EXAMPLE.splitlines())
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=text, model_writer=model, **(settings | options))
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[sentencepiece.SentencePieceProcessor, Path]:
    folder = tmp_path_factory.mktemp("sentencepiece") / "llama"
    return train(folder, user_defined_symbols=["<|turn|>"]), folder


TEXTS = [
    "",
    " ",
    "3 May. Bistritz.--Left Munich at 8:35 P.M.",
    "  two  spaces and\ttabs\n\nlines  ",
    "naïve 世界 🎉 \u0301",
    "before<|turn|>after",
    EXAMPLE[:2000],
]


def test_merges_are_all_pairs_of_pieces_that_form_a_piece() -> None:
    alphabet = "ab"
    tokens = [*{"".join(letters) for size in range(1, 6) for letters in itertools.product(alphabet, repeat=size)}]
    rng = random.Random(0)
    pieces = rng.sample(range(len(tokens)), 40)
    scores = [float(rng.randrange(9)) for _ in tokens]
    known = {tokens[id] for id in pieces}
    every = [
        (tokens[id][:cut], tokens[id][cut:])
        for id in sorted(pieces, key=lambda id: -scores[id])
        for cut in range(1, len(tokens[id]))
    ]
    assert _merges(tokens, pieces, scores) == [pair for pair in every if known.issuperset(pair)]


def test_a_long_token_takes_little_time() -> None:
    """Slicing it at every cut would take a minute."""
    started = time.process_time()
    assert _merges(["a", "b" * 500_000, "c" * 1000], [0, 1, 2], [0.0] * 3) == []
    assert time.process_time() - started < 5


def test_tokens_of_spaces_are_matched_first(tmp_path: Path) -> None:
    """Gemma has tokens for runs of spaces and of line ends, which are no pieces of the BPE."""
    runs = ["\u2581\u2581", "\u2581" * 4, "\n\n", "<|turn|>"]
    known = train(tmp_path / "gemma", user_defined_symbols=runs, add_dummy_prefix=False)
    tokenizer = Tokenizer(tmp_path / "gemma", VOCAB)
    for text in [*TEXTS, "    indented\n        twice\n\n\nx", "   three", "x <|turn|>  y", "  ", "\u2581\u2581"]:
        assert tokenizer.encode(text, special=False) == known.encode(text), text


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_sentencepiece(llama: tuple[Any, Path], text: str) -> None:
    theirs, folder = llama
    ours = Tokenizer(folder, VOCAB)
    # A user-defined symbol splits the text, and this library puts a space before each part.
    if "<|turn|>" not in text:
        assert ours.encode(text, special=False) == theirs.encode(text)
    assert ours.encode(text) == [theirs.bos_id(), *ours.encode(text, special=False)]
    assert (theirs.piece_to_id("<|turn|>") in ours.encode(text)) == ("<|turn|>" in text)


@pytest.mark.slow
@given(text=st.text(st.sampled_from("ab ctheinr.,1\n▁é世")))
@settings(max_examples=300, deadline=None)
def test_ids_of_any_text_are_those_of_sentencepiece(llama: tuple[Any, Path], text: str) -> None:
    theirs, folder = llama
    assert Tokenizer(folder, VOCAB).encode(text, special=False) == theirs.encode(text)


@pytest.mark.parametrize(
    "options",
    [
        {"remove_extra_whitespaces": True},
        {"add_dummy_prefix": False},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
        {"byte_fallback": False},
    ],
    ids=",".join,
)
def test_normalisation_settings_are_those_of_sentencepiece(tmp_path: Path, options: dict[str, Any]) -> None:
    theirs = train(tmp_path / "model", **options)
    ours = Tokenizer(tmp_path / "model", VOCAB)
    for text in ["It was  a dark night. ", "ﬁne Ⅳ", "x世界"]:
        assert ours.encode(text, special=False) == theirs.encode(text), text


def test_bos_and_eos_follow_tokenizer_config(llama: tuple[Any, Path], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes((llama[1] / "tokenizer.model").read_bytes())
    config = {"add_bos_token": False, "add_eos_token": True, "eos_token": {"content": "</s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ids = Tokenizer(tmp_path, VOCAB).encode("the night")
    assert ids == [*llama[0].encode("the night"), 2]
    assert Tokenizer(tmp_path, VOCAB).encode("the night", special=False) == ids[:-1]


@pytest.mark.parametrize("place", ["added_tokens.json", "tokenizer_config.json"])
def test_tokens_beyond_the_model(llama: tuple[Any, Path], tmp_path: Path, place: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes((llama[1] / "tokenizer.model").read_bytes())

    def add(id: int) -> None:
        added: Any = {"<pad>": id, "<|im_end|>": id + 1}
        if place == "tokenizer_config.json":
            added = {
                "added_tokens_decoder": {str(id): {"content": text, "special": True} for text, id in added.items()}
            }
        (tmp_path / place).write_text(json.dumps(added))

    add(VOCAB)
    tokenizer = Tokenizer(tmp_path, VOCAB + 2)
    assert tokenizer.encode("a<|im_end|>", special=False)[-1] == VOCAB + 1
    assert tokenizer.token_bytes(VOCAB + 1) == b""
    add(VOCAB + 7)
    with pytest.raises(ModelError, match=f"has {VOCAB + 1} tokens, and the added token '<pad>' has the id {VOCAB + 7}"):
        Tokenizer(tmp_path, VOCAB + 9)


def test_a_model_runs_with_it(quantspec: Any, tmp_path: Path) -> None:
    model = copy_demo(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    # A model refuses a tokenizer with less than half its vocabulary; the example alone is too small.
    turns = [f"<|{number}|>" for number in range(4_000)]
    train(tmp_path / "trained", vocab_size=5_000, user_defined_symbols=turns)
    (model / "tokenizer.model").write_bytes((tmp_path / "trained" / "tokenizer.model").read_bytes())
    outcome: Outcome = quantspec("run", "--model", str(model), "--text", "the night", "-n", "4", "--json")
    assert outcome.json["results"][0]["new_tokens"] == 4


def test_damaged_files_end_in_one_error(llama: tuple[Any, Path], tmp_path: Path) -> None:
    whole = (llama[1] / "tokenizer.model").read_bytes()
    path = tmp_path / "tokenizer.model"
    errors = []
    for data in damaged(whole, 300):
        path.write_bytes(data)
        try:
            Tokenizer(tmp_path, VOCAB).encode("the night")
        except ModelError as error:
            errors.append(error.message)
    assert len(errors) > 100
    assert all(str(path) in error and "\n" not in error for error in errors)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "holds no tokens"),
        (b"\x0a\xff", "ends within a number"),
        (b"\x0a" + b"\xff" * 12, "more than ten bytes"),
        (b"\x0a\x05ab", "5 bytes where 2 are left"),
        (b"\x0b", "wire type 3"),
        (b"\x08\x01", "a number instead of bytes"),
        (b"\x0a\x02\x0a\xff", "ends within a number"),
        (b"\x0a\x03\x0a\x01\xff", "utf-8"),
        (b"\x0a\x03\x0a\x01a", "type 1"),
    ],
)
def test_a_damaged_model_names_its_problem(tmp_path: Path, data: bytes, what: str) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(ModelError, match=what):
        Tokenizer(tmp_path, VOCAB)
