#!/usr/bin/env python3
"""Measure how soon the answer to a second question about a document starts, compared with the first.

    python benchmarks/second_question.py [MODEL] [--tokens 60000] [--device cuda] [--folder DIR]

The document is the beginning of the book in the package. Its first prefill fills the prompt cache, in memory and then in
files in DIR (by default a temporary folder). The second question is asked of the same engine in memory, and of a new
engine that reads the files. If the folder is too slow to keep the prompt, `files` is null and `note` says so. Needs
quantspec; prints one JSON object. Shares are of the first prefill's time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quantspec_cli import Engine

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "python/quantspec_cli/book.txt.gz"
QUESTIONS = ("Who tells the story?", "Where does it take place, and when?")
# Tokens that the questions and the format of a prompt may take.
QUESTION_TOKENS = 512


def document(engine: Engine, tokens: int) -> str:
    """The beginning of the book, of about so many tokens."""
    ids = engine.model.tokenizer.encode_start(gzip.decompress(BOOK.read_bytes()).decode(), tokens)
    return b"".join(map(engine.model.tokenizer.token_bytes, ids)).decode(errors="ignore")


def ask(engine: Engine, text: str, question: str) -> dict[str, Any]:
    """Seconds of tokenizing, of the prefill in the engine, and from the question to the first token."""
    before, started = engine.statistics(), time.perf_counter()
    prompt = engine.model.prompt(text, instruction=question, context=engine.context)
    tokenized = time.perf_counter()
    with engine.stream(prompt, max_new_tokens=1, ignore_eos=True) as stream:
        for _ in stream:
            pass
    ended, after = time.perf_counter(), engine.statistics()
    return {
        "prompt_tokens": len(prompt.ids),
        "reused_tokens": after["reused_tokens"] - before["reused_tokens"],
        "tokenize_s": tokenized - started,
        "prefill_s": after["prefill_s"] - before["prefill_s"],
        "first_token_s": ended - started,
    }


def main() -> None:
    """Asks both questions of every kind of prompt cache, and prints the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=60_000, help="tokens of the document")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--folder", help="where the files are written")
    given = parser.parse_args()

    def load(cache: str | bool) -> Engine:
        return Engine.load(given.model, context=given.tokens + QUESTION_TOKENS, device=given.device, prompt_cache=cache)

    with load(True) as engine:
        text = document(engine, given.tokens)
        first, memory = (ask(engine, text, question) for question in QUESTIONS)
        info, held = engine.info, engine.statistics()["prompt_cache_bytes"]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        with load(folder) as engine:
            recorded, note = ask(engine, text, QUESTIONS[0]), engine.prompt_cache_note()
        with load(folder) as engine:
            files = None if note else ask(engine, text, QUESTIONS[1])
    found = {
        "device_name": info["device_name"],
        "simd": info["simd"],
        "prompt_tokens": first["prompt_tokens"],
        "prompt_cache_bytes": held,
        "first": first,
        "memory": memory,
        "first_with_files": recorded,
        "files": files,
        "note": note,
        "memory_share": memory["first_token_s"] / first["prefill_s"],
        "files_share": files and files["first_token_s"] / first["prefill_s"],
    }
    sys.stdout.write(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
