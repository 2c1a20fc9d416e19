"""Records the tokens of the demo model with every method (`record_tokens.py FILE`), or compares them (`--compare FILE`).

Record before a change that must not change a token, and compare after it, once per path: QUANTSPEC_SIMD selects the CPU's
path, `--device cuda` the GPU. A recording is valid for one path, as each rounds differently.

A case decodes one prompt, or three of different lengths. It records the tokens and, if γ is fixed, the number of accepted
drafted tokens, which detects a draft that reads different data. γ auto depends on measured times: under rejection its
tokens are not reproducible, so it is left out there. On a GPU a draft step's rounding depends on its number of rows, so
the drafts of a batch depend on when its sequences join: there only greedy and replay tokens of batches are compared.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quantspec_cli
from quantspec_cli import Engine, QuantspecError
from quantspec_cli.model import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TEXT = Path(quantspec_cli.__file__).with_name("sample.txt")
# The first prompt has five pages of 128 tokens, of which a decode step sees four; the last answer begins in the first page.
LENGTHS = (650, 130, 9)
NEW_TOKENS = 48
BATCHES = (1, 3)
GAMMAS: tuple[int | str, ...] = (0, 1, 4, "auto")
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "replay": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 11},
    "rejection": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "seed": 11},
}


@dataclass(frozen=True)
class Way:
    """Options of an engine."""

    method: str
    kv_target: str = "int8"
    gamma: int | str = "auto"
    accept: str = "replay"
    draft_weights: str | None = None
    draft_pages: int | None = None

    def __str__(self) -> str:
        named = (f"γ {self.gamma}", self.draft_weights, self.draft_pages and f"{self.draft_pages} pages")
        return " ".join([self.method, self.kv_target, *(str(part) for part in named if part)])

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `Engine.load`, limited to those the method supports.

        Draft weights have 4 bits at any context.
        """
        options = {name: value for name, value in vars(self).items() if value is not None}
        if self.method in {"quantspec", "w4"} and self.draft_weights != "none":
            options["draft_precision"] = "none"
        return options


def ways() -> Iterator[Way]:
    """Every method and cache view with every γ; draft weights and selected pages with γ 4."""
    for kv_target, accept in product(("int8", "fp16", "int4"), ("replay", "rejection")):
        yield Way("ar", kv_target, 0, accept)
        for method, gamma in product(("quantspec", "kv4", "w4"), GAMMAS):
            if (gamma, accept) != ("auto", "rejection"):
                yield Way(method, kv_target, gamma, accept)
        for method, weights in product(("quantspec", "w4"), ("int4-mlp", "none")):
            yield Way(method, kv_target, 4, accept, draft_weights=weights)
        yield Way("quantspec", kv_target, 4, accept, draft_pages=2)


def quick() -> Iterator[Way]:
    """Enough to detect, in seconds, a method or view that decodes different tokens."""
    for method, accept in product(("quantspec", "kv4", "w4"), ("replay", "rejection")):
        yield Way(method, "int8", 4, accept)
    yield Way("ar", "fp16", 0)
    yield Way("quantspec", "int4", 4, "rejection")
    yield Way("quantspec", "int8", 4, "rejection", draft_pages=2)


def record(chosen: Iterable[Way], device: str) -> dict[str, Any]:
    """What every way decodes, by case."""
    found: dict[str, Any] = {}
    for way in chosen:
        engine = Engine.load(
            context=LENGTHS[0] + NEW_TOKENS, batch=max(BATCHES), device=device, prompt_cache=False, **way.options()
        )
        ids = engine.model.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        prompts = [Prompt([ids[0], *ids[1 + place : length + place]]) for place, length in enumerate(LENGTHS)]
        for sampler in ("greedy", "replay") if way.accept == "replay" else ("rejection",):
            for batch in BATCHES:
                before = engine.statistics()["accepted_tokens"]
                texts = engine.generate_batch(
                    prompts[:batch], max_new_tokens=NEW_TOKENS, ignore_eos=True, **SAMPLING[sampler]
                )
                accepted = engine.statistics()["accepted_tokens"] - before
                found[f"{way}, {sampler}, {batch} at once"] = {
                    "tokens": [text.tokens for text in texts],
                    "accepted": None if way.gamma == "auto" else accepted,
                }
    return found


def read(file: Path) -> dict[str, Any]:
    """A recording."""
    with gzip.open(file, "rt", encoding="utf-8") as text:
        recorded: dict[str, Any] = json.load(text)
        return recorded


def write(file: Path, found: dict[str, Any]) -> None:
    """Writes a recording, one case per line; equal recordings have equal bytes."""
    lines = ",\n".join(f"{json.dumps(case, ensure_ascii=False)}: {json.dumps(value)}" for case, value in found.items())
    file.write_bytes(gzip.compress(f"{{\n{lines}\n}}\n".encode(), mtime=0))


def differences(recorded: dict[str, Any], found: dict[str, Any], device: str = "cpu") -> list[str]:
    """One line per case that differs from the recording or is missing in it."""
    lines = []
    for case, value in found.items():
        other = recorded.get(case)
        if other is None:
            lines.append(f"{case}: not recorded")
            continue
        drafts_vary = device != "cpu" and not case.endswith(", 1 at once")
        if drafts_vary and "rejection" in case:
            continue
        for index, (right, wrong) in enumerate(zip(other["tokens"], value["tokens"], strict=True)):
            at = next((at for at, pair in enumerate(zip(right, wrong, strict=True)) if pair[0] != pair[1]), None)
            if at is not None:
                lines.append(f"{case}: token {at} of prompt {index} is {wrong[at]} and was {right[at]}")
        if other["accepted"] != value["accepted"] and not drafts_vary:
            lines.append(f"{case}: {value['accepted']} drafted tokens were accepted, and {other['accepted']} before")
    return lines


def main() -> int:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, help="recording to write (.json.gz)")
    parser.add_argument("--compare", type=Path, help="recording to compare with")
    parser.add_argument("--device", default="cpu", help="cpu (the default), cuda or cuda:N")
    parser.add_argument("--quick", action="store_true", help="a few cases only")
    arguments = parser.parse_args()
    if (arguments.file is None) == (arguments.compare is None):
        parser.error("name a file to write, or one after --compare")
    recorded = read(arguments.compare) if arguments.compare else {}
    found = record(quick() if arguments.quick else ways(), arguments.device)
    if arguments.file:
        write(arguments.file, found)
        return 0
    lines = differences(recorded, found, arguments.device)
    if not arguments.quick:
        lines += [f"{case}: not decoded" for case in recorded if case not in found]
    sys.stdout.write(("\n".join(lines) or f"{len(found)} cases are as recorded") + "\n")
    return 1 if lines else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except QuantspecError as error:
        sys.exit(f"error: {error.message}\nhint: {error.hint}")
