#!/usr/bin/env python3
"""Compare `quantspec batch` on a folder of long documents with the time that its kernels need.

    python benchmarks/folder.py [MODEL] [--documents 64] [--shortest 2000] [--longest 60000] [-n 100] [--device cuda]

Documents are parts of the book in the package; the logarithms of their lengths are uniform. The kernels' time is computed
from rates of `quantspec bench`: of each prompt alone, at its length, and of the answers, with as many sequences as a round
of the batch has. Needs quantspec; prints one JSON object, times in seconds.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "python/quantspec_cli/book.txt.gz"
# About that many of the book for the demo model's tokenizer.
CHARACTERS_PER_TOKEN = 3.6
# Lengths at which a prompt is measured, as shares of the longest.
MEASURED = (0.0625, 0.25, 0.5, 1.0)


def quantspec(*arguments: str) -> Any:
    """The JSON document of a command; its errors go to the terminal."""
    command = [sys.executable, "-m", "quantspec_cli", *arguments, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def write(folder: Path, documents: int, shortest: int, longest: int) -> None:
    """Writes the documents."""
    text = gzip.decompress(BOOK.read_bytes()).decode()
    dice = random.Random(5)
    folder.mkdir()
    for number in range(documents):
        tokens = math.exp(dice.uniform(math.log(shortest), math.log(longest)))
        length = min(round(tokens * CHARACTERS_PER_TOKEN), len(text))
        start = dice.randrange(len(text) - length + 1)
        (folder / f"{number:04}.txt").write_text(text[start : start + length])


def interpolated(points: Sequence[tuple[int, float]], tokens: int) -> float:
    """Seconds of a prompt, linear between the measured lengths."""
    at = min(max(bisect.bisect([length for length, _ in points], tokens), 1), len(points) - 1)
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (high - low) * (tokens - left) / (right - left)


def kernels_s(common: Sequence[str], report: dict[str, Any], new_tokens: int) -> tuple[float, float]:
    """Seconds of the prompts, each alone, and of the answers."""
    lengths = [result["prompt_tokens"] for result in report["results"]]
    tested = ",".join(str(round(share * max(lengths))) for share in MEASURED)
    rows = quantspec("bench", *common, "-p", tested, "-n", "0", "-r", "2")
    points = [(row["n_prompt"], row["n_prompt"] / row["tokens_per_s"]) for row in rows if row["test"] == "pp"]
    prompts = sum(interpolated(sorted(points), tokens) for tokens in lengths)
    together = str(max(1, round(report["stats"]["batch_mean"])))
    depth, new = str(sum(lengths) // len(lengths)), str(new_tokens)
    drafting = ("--methods", "quantspec", "--draft-pages", "auto")  # as `batch` drafts
    rows = quantspec("bench", *common, "-p", "0", "-n", new, "-d", depth, "--batch", together, *drafting)
    (decode,) = (row["tokens_per_s"] for row in rows if row["test"] == "tg")
    # A prompt yields the first token of its answer.
    return prompts, sum(result["new_tokens"] - 1 for result in report["results"]) / decode


def main() -> None:
    """Runs the batch, measures the kernels, and prints both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(ROOT / "python/quantspec_cli/demo"))
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=2000, help="tokens of the shortest document")
    parser.add_argument("--longest", type=int, default=60_000, help="tokens of the longest document")
    parser.add_argument("-n", type=int, default=100, help="tokens of each answer")
    parser.add_argument("--parallel", default="auto")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    common = ("-m", given.model, "--device", given.device)
    with tempfile.TemporaryDirectory() as folder:
        docs, out = Path(folder) / "docs", Path(folder) / "out"
        write(docs, given.documents, given.shortest, given.longest)
        command = ["batch", str(docs), "--out", str(out), *common, "-n", str(given.n), "--parallel", given.parallel]
        report = quantspec(*command, "--ignore-eos", "-q")
    stats = report["stats"]
    prompts_s, answers_s = kernels_s(common, report, given.n)
    outside = stats["wall_s"] - stats["count_s"] - stats["load_s"] - stats["engine_s"]
    sys.stdout.write(
        json.dumps(
            {
                "documents": report["done"],
                "prompt_tokens": sum(result["prompt_tokens"] for result in report["results"]),
                "new_tokens": sum(result["new_tokens"] for result in report["results"]),
                "documents_per_hour": stats["documents_per_hour"],
                "wall_s": stats["wall_s"],
                "count_s": stats["count_s"],
                "load_s": stats["load_s"],
                "engine_s": stats["engine_s"],
                "outside_s": outside,
                "idle_share": 1 - stats["engine_s"] / stats["wall_s"],
                "idle_share_after_load": outside / (outside + stats["engine_s"]),
                "prefill_s": stats["prefill_s"],
                "decode_s": stats["decode_s"],
                "engine_other_s": stats["engine_s"] - stats["prefill_s"] - stats["decode_s"],
                "kernels_prompts_s": prompts_s,
                "kernels_answers_s": answers_s,
                "kernels_share": (prompts_s + answers_s) / stats["wall_s"],
                "longest_chunk_s": stats["longest_chunk_s"],
                "sequences_per_round": stats["batch_mean"],
                "reserved_pages": stats["reserved_pages"],
                "pool_waste": stats["pool_waste"],
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
