"""The size of a batch's engine, and `--dry-run`: tokens, memory and time of a batch before anything is written."""

from __future__ import annotations

from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from . import __version__, batch_view, journal, output, plan, render, sources
from .errors import EXIT_DONE, FileError
from .model import planned
from .slots import PARALLEL, Opening, together

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    from . import _native
    from .batch import Arguments
    from .batch_reader import Reader
    from .batch_work import Job, Workload
    from .errors import QuantspecError
    from .model import Model
    from .options import EngineOptions


def _examined(
    arguments: Arguments, workload: Workload, reader: Reader, opening: Opening | None
) -> Iterator[tuple[Job, QuantspecError | None]]:
    """The pending documents with their token counts, or with an error. Ends early if the device cannot be opened."""
    out = Path(arguments.out)
    known: list[Job] = []
    for job in workload.todo:
        try:
            journal.check_place(out, job.output)
            if job.source.name in workload.foreign:
                raise journal.not_own(out, job.output)
        except FileError as error:
            yield job, error
        else:
            known.append(job)
    for found in reader.examine(known):
        if opening is not None:
            opening.check()
        yield found


def longest(reader: Reader, todo: Sequence[Job]) -> int:
    """Tokens of the longest sequence to decode."""
    tokens = [job.tokens for job in todo if job.tokens is not None]
    if reader.may_split and any(known > reader.budget for known in tokens):
        return reader.context
    lengths = [known + reader.new_tokens(known) for known in tokens]
    return max((length for length in lengths if length <= reader.context), default=reader.new_tokens(1) + 1)


class Room(NamedTuple):
    """Size of a batch's engine.

    Attributes:
        context: tokens of the longest sequence.
        parallel: concurrent sequences.
        pool: tokens of all sequences together: prompts and answers, in whole pages.
        wanted: tokens of the longest sequence that was requested.
        most: tokens of a sequence that fits into memory, at most the wanted ones.
    """

    context: int
    parallel: int
    pool: int
    wanted: int
    most: int


def room(
    arguments: Arguments,
    engine_options: EngineOptions,
    reader: Reader,
    todo: Sequence[Job],
    opened: _native.OpenDevice,
) -> Room:
    """The longest sequence that fits, and as many sequences as memory holds on average, because they share its pages."""
    wanted = longest(reader, todo)
    plan_of = partial(planned, reader.model, engine_options, opened=opened)
    alone = plan_of(context=wanted)
    held = max(wanted if alone["fits"] else min(wanted, alone["longest_context"]), 1)
    most = arguments.parallel or PARALLEL[alone["device"].partition(":")[0]]
    lengths: list[int] = []
    for job in todo:
        tokens = job.tokens or held
        length = tokens + reader.new_tokens(tokens)
        if length <= held and (not reader.may_split or tokens <= reader.budget):
            lengths.append(length)
        elif reader.may_split:  # into parts that decode together; otherwise it is refused
            parts = -(-tokens // max(held - reader.part_tokens, 1))
            lengths += [held] * min(parts, most)
    context = max(lengths, default=held)
    return Room(context, *together(plan_of, context, lengths or [context], most), wanted, held)


def counted(
    arguments: Arguments, workload: Workload, reader: Reader, opening: Opening | None
) -> Generator[tuple[Job, QuantspecError | None]]:
    """The pending documents with their token counts, or with an error. Shows progress."""
    with render.progress("counting tokens", shown=not arguments.quiet) as on_progress:
        for number, found in enumerate(_examined(arguments, workload, reader, opening), 1):
            yield found
            if on_progress is not None:
                on_progress(number, len(workload.todo))


def _row(reader: Reader, job: Job, error: QuantspecError | None) -> dict[str, Any]:
    """A document in `--dry-run`."""
    new_tokens = reader.new_tokens(job.tokens or 0) if job.calls == 1 else reader.part_tokens * job.calls
    return {
        "document": job.source.shown,
        "output": sources.shown(job.output),
        "prompt_tokens": job.planned_tokens if job.calls > 1 else job.tokens,
        "shared_tokens": job.shared,
        "new_tokens": new_tokens,
        "error": error and error.to_json()["error"],
        **({"warnings": list(job.warnings)} if job.warnings else {}),
    }


def dry_run(
    arguments: Arguments,
    engine_options: EngineOptions,
    workload: Workload,
    reader: Reader,
    rates: Mapping[str, Mapping[str, float]],
) -> output.Done:
    """Prints the plan and writes nothing. The time follows from the rates of earlier runs into this folder, or from
    `quantspec plan`.
    """
    opening = Opening(reader.model, engine_options)
    found = list(counted(arguments, workload, reader, opening))
    ready = [job for job, error in found if error is None]
    opened = opening.take()
    context, parallel, pool, wanted, most = room(arguments, engine_options, reader, ready, opened)
    held = planned(reader.model, engine_options, context=context, batch=parallel, pool=pool, opened=opened)
    reader.limit(most, wanted)
    rows = [_row(reader, job, error or reader.refusal(job)) for job, error in found]
    possible = [row for row in rows if row["error"] is None]
    document = {
        "quantspec": __version__,
        "model": reader.model.name,
        "documents": len(workload.todo) + len(workload.skipped) + len(workload.failed),
        "to_do": len(possible),
        "refused": len(rows) - len(possible),
        "failed": len(workload.failed),
        "skipped": len(workload.skipped),
        "prompt_tokens": sum(row["prompt_tokens"] for row in possible),
        "shared_tokens": sum(row["shared_tokens"] for row in possible),
        "new_tokens": sum(row["new_tokens"] for row in possible),
        "context": context,
        "parallel": parallel,
        "pool": pool,
        **held,
        "predicted_s": None,
        "predicted_from": None,
        "results": rows,
    }
    measured = rates.get(held["device"])
    if possible and (speeds := measured or _predicted_rates(reader.model, engine_options, document)) is not None:
        document["predicted_from"] = "run" if measured else "plan"
        processed = document["prompt_tokens"] - document["shared_tokens"]
        document["predicted_s"] = (
            processed / speeds["prefill_tokens_per_s"] + document["new_tokens"] / speeds["decode_tokens_per_s"]
        )
    if arguments.as_json:
        return output.Done(EXIT_DONE, document)
    stdout = output.Stdout()
    for line in batch_view.dry_run_lines(document, splits=any(job.calls > 1 for job in ready)):
        stdout.write(line + "\n")
    return output.Done(EXIT_DONE)


def _predicted_rates(model: Model, options: EngineOptions, document: Mapping[str, Any]) -> Mapping[str, float] | None:
    """Rates that `quantspec plan` predicts for documents of average length; None if it cannot. A method that it does not
    predict counts as plain decoding.
    """
    # A document beyond the context is split.
    size = max(1, min((document["prompt_tokens"] + document["new_tokens"]) // document["to_do"], document["context"]))
    arguments = plan.Arguments(
        model=str(model.directory),
        revision=None,
        offline=True,
        ctx_size=size,
        batch=max(1, min(document["parallel"], document["pool"] // size)),
        acceptance=None,
        as_json=True,
    )
    found = plan.examine(arguments, options)
    predicted = found["predicted"]
    if predicted is None or predicted["prefill_tokens_per_s"] is None:
        return None
    return {
        "prefill_tokens_per_s": predicted["prefill_tokens_per_s"],
        "decode_tokens_per_s": _decode_rate(found["methods"], options),
    }


def _decode_rate(rows: Sequence[Mapping[str, Any]], options: EngineOptions) -> float:
    """Predicted tokens/s of the options' method, or of plain decoding if the method is not predicted. With `--draft-pages
    auto` its fastest row counts, otherwise the row with the fewest pages that are at least the draft's.
    """

    def predicted(method: str) -> dict[float, float]:
        """Rates by pages; all pages are infinitely many."""
        return {
            inf if row["draft_pages"] == "all" else row["draft_pages"]: row["decode_tokens_per_s"]
            for row in rows
            if row["method"] == method and row["decode_tokens_per_s"]
        }

    rates = predicted(options.method) or predicted("ar")
    pages = options.pages_of_draft
    if pages == "auto":
        return max(rates.values())
    least = inf if pages == "all" else pages
    return rates[min((number for number in rates if number >= least), default=max(rates))]
