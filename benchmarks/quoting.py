#!/usr/bin/env python3
"""Measure what copies of earlier text gain on answers that quote, and cost on other answers.

    python benchmarks/quoting.py MODEL [--device cuda] [--documents 4] [--json FILE]

Both tasks have the same documents, parts of the book that `quantspec bench` reads. An instruct checkpoint copies sentences,
or summarises; these answers are greedy. Other checkpoints continue a document whose beginning is repeated at its end
(greedy), or a document alone (at temperature 1, as greedy text of small models repeats itself). There are no penalties.

The methods decode each answer in turn, `REPETITIONS` times with the engines loaded in either order. Of an order the least
time of decoding counts, then the mean of both. The methods must emit the same tokens.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quantspec_cli import Engine
from quantspec_cli.bench.grid import BOOK
from quantspec_cli.model import Model

METHODS = ("quantspec", "quantspec+ngram")
INSTRUCTIONS = {
    "quoting": "Copy the first ten sentences of the text, word for word, each on its own line.",
    "summary": "Summarize the text in ten sentences, in your own words.",
}
CHARACTERS = 4_000
# Of a document's beginning, repeated at its end.
REPEATED = 400
NEW_TOKENS = 256
REPETITIONS = 2


def documents(count: int) -> list[str]:
    """Equally spaced parts of the book, from a paragraph's beginning on."""
    book = gzip.decompress(BOOK.read_bytes()).decode()
    starts = [book.index("\n\n", len(book) * index // count) + 2 for index in range(count)]
    return [book[start : start + CHARACTERS] for start in starts]


def requests(model: Model, count: int) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Task, prompt and sampling of every answer."""
    for task, instruction in INSTRUCTIONS.items():
        for seed, text in enumerate(documents(count)):
            if model.chat_template is not None:
                yield task, model.prompt(text, instruction=instruction), {}
            elif task == "quoting":
                yield task, model.prompt(text + "\n\n" + text[:REPEATED]), {}
            else:
                yield "continuation", model.prompt(text), {"temperature": 1.0, "seed": seed}


def seconds_per_token(engine: Engine, prompt: Any, sampling: dict[str, Any]) -> tuple[float, list[int], int]:
    """Seconds of decoding per token, the tokens, and how many drafted ones were copied."""
    before = engine.statistics()
    tokens = list(engine.generate(prompt, max_new_tokens=NEW_TOKENS, ignore_eos=True, **sampling).tokens)
    after = engine.statistics()
    copied = after["copied_tokens"] - before["copied_tokens"]
    return (after["decode_s"] - before["decode_s"]) / len(tokens), tokens, copied


def decode(arguments: argparse.Namespace, order: Sequence[str]) -> list[dict[str, Any]]:
    """Every answer by every method, of engines that are loaded in this order."""
    engines = {
        method: Engine.load(arguments.model, method=method, device=arguments.device, context=8_192) for method in order
    }
    rows = []
    for task, prompt, sampling in requests(engines[order[0]].model, arguments.documents):
        times: dict[str, list[float]] = {method: [] for method in order}
        answers: dict[str, list[int]] = {}
        copied = 0
        for repetition in range(REPETITIONS):
            for method in order[:: -1 if repetition % 2 else 1]:
                seconds, answers[method], own = seconds_per_token(engines[method], prompt, sampling)
                times[method].append(seconds)
                copied = max(copied, own)
        if answers[METHODS[0]] != answers[METHODS[1]]:
            raise SystemExit("error: the methods emitted different tokens\nhint: run quantspec selftest")
        rows.append(
            {
                "task": task,
                "device_name": engines[order[0]].info["device_name"],
                "ms_per_token": {method: min(times[method]) * 1e3 for method in METHODS},
                "copied_per_token": copied / len(answers[METHODS[0]]),
            }
        )
    return rows


def main() -> None:
    """Prints a row per task, and writes all answers' rows with --json."""
    parser = argparse.ArgumentParser(description="Measure what copies of earlier text gain.")
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    # The engine that is loaded second may be faster, so both orders count.
    rows = decode(arguments, METHODS)
    for row, swapped in zip(rows, decode(arguments, METHODS[::-1]), strict=True):
        times = row["ms_per_token"]
        for method in METHODS:
            times[method] = statistics.fmean((times[method], swapped["ms_per_token"][method]))
        row["gain"] = times[METHODS[0]] / times[METHODS[1]]
    lines = [
        "| task | quantspec, ms/token | with ngram | gain | least and most | copied per token |",
        "| --- " * 6 + "|",
    ]
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        gains = [row["gain"] for row in of_task]
        mean = [statistics.fmean(row["ms_per_token"][method] for row in of_task) for method in METHODS]
        copied = statistics.fmean(row["copied_per_token"] for row in of_task)
        lines.append(
            f"| {task} | {mean[0]:.2f} | {mean[1]:.2f} | {statistics.geometric_mean(gains):.2f}× "
            f"| {min(gains):.2f}× – {max(gains):.2f}× | {copied:.2f} |"
        )
    sys.stdout.write("\n".join(lines) + "\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
