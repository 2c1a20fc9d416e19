#!/usr/bin/env python3
"""Render the tables of docs/benchmarks.md from benchmarks/results/.

    python benchmarks/page.py          render
    python benchmarks/page.py --check  exit 1 if the page is not its rendering

run.py measures the CPU cases, run_gpu.sh those of a GPU, llama_cpp.py those next to llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from typing import Any

from run import DOCUMENTS, RESULTS, ROOT, Row

PAGE = ROOT / "docs/benchmarks.md"
NO_RUN = "No run is recorded."
# The widened models of run_gpu.sh that decode one sequence.
SHAPES = {"wide7": "Shape of Llama-2-7B", "wide8": "Shape of Llama-3.1-8B"}


def recorded(name: str) -> Any:
    """What a file of benchmarks/results/ holds, by line if it is JSON Lines; None without the file."""
    path = RESULTS / name
    if not path.exists():
        return None
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)


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
    measured = recorded("cpu.json")
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
        head = ["context", "method", "tokens/s", "speed-up", "slowest / fastest run", "accepted"]
        prompts = [
            f"{row['tokens_per_s']:,.0f} after {row['n_depth']:,}" for row in case["rows"] if row["test"] == "pp"
        ]
        command = f"`quantspec bench {' '.join(case['options'])}`"
        said = f"Prompt of 512 tokens, tokens/s after a context: {', '.join(prompts)}."
        parts += [f"### {name}", command, table(head, lines), said]
    return "\n\n".join(parts)


def cpu_plan() -> str:
    """The section between the markers `cpu plan`."""
    measured = recorded("cpu-plan.json")
    if measured is None:
        return NO_RUN
    methods = list(dict.fromkeys(row["method"] for rows in measured["cases"].values() for row in rows))
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
    measured = recorded("cpu-documents.json")
    if measured is None:
        return NO_RUN
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
        if (rows := recorded(f"h200-{name}.json")) is not None:
            parts += [f"### {shape}", one_sequence(name, rows)]
    parts += ["### Batches", f"NVIDIA H200, commit `{commit_of('batch')}`.\n\n{batches()}"]
    parts += [
        "### Copies of earlier text",
        f"This and what follows is of commit `{commit_of('documents')}`.\n\n{copies()}",
    ]
    parts += ["### A folder of documents", folder()]
    if (second := recorded("h200-second-question.json")) is not None:
        parts[-1] += "\n" + second_question(second)
    return "\n\n".join(parts)


def commit_of(part: str) -> str:
    """The commit that run_gpu.sh measured a part of."""
    return (RESULTS / f"h200-{part}.commit").read_text().strip()[:12]


def one_sequence(name: str, rows: list[Row]) -> str:
    """What run_gpu.sh measured of one sequence on a widened model: `rows` accept drafts by replay."""
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
        for row in rows + recorded(f"h200-{name}-rejection.json") + recorded(f"h200-{name}-int8.json")
    ]
    lines += [
        [f"{row['depth']:,}", pytorch(row), f"{row['ms']:.2f}", f"{1000 / row['ms']:.0f}", "", "", ""]
        for row in recorded(f"h200-{name}-torch.jsonl")
    ]
    head = ["context", "method", "ms/token", "tokens/s", "speed-up", "accepted", "plan"]
    return f"{rows[0]['device_name']}, commit `{commit_of(name)}`.\n\n{table(head, lines)}"


def copies() -> str:
    """What quoting.py measured."""
    rows: list[Row] | None = recorded("h200-quoting.json")
    if rows is None:
        return NO_RUN
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
    rows: list[Row] = recorded("h200-batch.jsonl")
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
    lines += [
        [str(row["batch"]), f"{row['depth']:,}", pytorch(row), f"{1000 * row['batch'] / row['ms']:,.0f}", "", "", ""]
        for row in recorded("h200-batch-torch.jsonl")
    ]
    return table(["sequences", "context of each", "method", "tokens/s", "speed-up", "accepted", "mean γ"], lines)


def pytorch(row: Row) -> str:
    """What torch_step.py measured."""
    return f"PyTorch, {row['attention']}"


def folder() -> str:
    """The list of what folder.py measured."""
    found = recorded("h200-folder.json")
    tokens = found["prompt_tokens"]
    return "\n".join(
        (
            f"* {found['documents']} documents of {tokens:,} tokens in all, with answers of {found['new_tokens']:,} in all, "
            f"in {found['wall_s']:.1f} s: {found['documents_per_hour']:,.0f} documents an hour.",
            f"* The kernels alone, each prompt by itself and answers at the batch's size, need "
            f"{100 * found['kernels_share']:.0f} % of that time.",
            f"* The GPU idles {100 * found['idle_share_after_load']:.1f} % of the time after loading, "
            f"{100 * found['idle_share']:.1f} % with loading and counting.",
            f"* Documents that decode wait at most {found['longest_chunk_s']:.2f} s for a chunk of another's prompt.",
        )
    )


def llama_cpp() -> str:
    """The section between the markers `llama.cpp`."""
    measured = recorded("llama_cpp.json")
    if measured is None:
        return NO_RUN
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
    """Renders or checks."""
    parser = argparse.ArgumentParser(description="Render the tables of docs/benchmarks.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is stale")
    check = parser.parse_args().check
    page = PAGE.read_text()
    if not check:
        PAGE.write_text(rendered(page))
    elif rendered(page) != page:
        sys.exit("error: docs/benchmarks.md is stale\nhint: python benchmarks/page.py")


if __name__ == "__main__":
    main()
