"""GGUF files as llama.cpp reads them: greedy tokens and their log-probabilities, and ids of texts, as recorded by
record_llama_cpp.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import add_byte_level
from record_llama_cpp import CASES, CONTEXT, DEMO, NEW_TOKENS, RECORDING, TEXTS, WORDS, digest, write_tiny, write_words

from quantspec_cli import Engine
from quantspec_cli.model import Model, Prompt

RECORDED: dict[str, Any] = json.loads(RECORDING.read_text())

# Largest difference of a log-probability. llama.cpp rounds the inputs of products to F16, or to 8 bits if the matrix is
# quantised; quantspec rounds neither. Tokens that are closer than this may change places.
TOLERANCE, OF_QUANTISED = 0.02, 0.25

# Here llama.cpp departs from the published tokenizers, and quantspec does not: Qwen2's composes accents, and the rules of
# tekken and gpt-4o keep marks with their letters.
KNOWN = {("qwen2", 0), ("tekken", 4), ("gpt-4o", 4), ("llama4", 4), ("kanana2", 4)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_text_is_llama_cpps(tmp_path: Path, name: str) -> None:
    """The text is llama.cpp's, until its two best tokens are too close, and each token of its text is as likely here."""
    case, recorded = CASES[name], RECORDED["models"][name]
    path = tmp_path / "model.gguf"
    case.write(path)
    assert digest(path) == recorded["sha256"]
    tolerance = TOLERANCE if case.mix in {"F32", "F16"} else OF_QUANTISED
    with Engine.load(path, method="ar", kv_target="fp16", context=CONTEXT, device="cpu") as engine:
        for ids, theirs in zip(case.ids(), recorded["answers"], strict=True):
            ours = engine.generate(Prompt(ids), max_new_tokens=NEW_TOKENS)
            pairs = zip(ours.tokens, theirs["tokens"], strict=False)
            split = next((at for at, (mine, its) in enumerate(pairs) if mine != its), None)
            if split is None:
                assert len(ours.tokens) == len(theirs["tokens"])
                assert (ours.stop_reason == "eos") == theirs["ends"]
            else:
                assert theirs["leads"][split] < tolerance, (len(ids), split)
            scores = engine.score(Prompt(ids + theirs["tokens"]))[len(ids) - 1 :]
            assert np.abs(scores - theirs["logprobs"]).max() < tolerance, len(ids)


@pytest.mark.parametrize("name", WORDS)
def test_ids_of_texts_are_llama_cpps(tmp_path: Path, name: str) -> None:
    kind, flags = WORDS[name]
    path = tmp_path / "words.gguf"
    write_words(path, kind, **flags)
    recorded = RECORDED["words"][name]
    assert digest(path) == recorded["sha256"]
    tokenizer = Model.open(str(path)).tokenizer
    for number, (text, theirs) in enumerate(zip(TEXTS, recorded["ids"], strict=True)):
        # llama.cpp begins a text with BOS even if it is already there.
        once = theirs[1:] if theirs[:2] == [1, 1] else theirs
        assert (tokenizer.encode(text) == once) != ((name, number) in KNOWN), (name, text)


def test_tokens_known_by_their_text_end_an_answer(tmp_path: Path) -> None:
    """Files of instruct models may name the token of base models alone, and leave that of a turn to the reader."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    count = len(tokenizer["model"]["vocab"])

    def add(writer: Any) -> None:
        add_byte_level(writer, tokenizer, "smollm", extra=("<|end|>", "<|user|>", "<end_of_turn>"))

    path = tmp_path / "model.gguf"
    write_tiny(path, count + 3, add)
    assert Model.open(str(path)).eos == {2, count, count + 2}
