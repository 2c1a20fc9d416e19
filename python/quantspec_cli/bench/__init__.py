"""`quantspec bench`: prefill and decoding at depth, in llama-bench's grammar, compared with memory bandwidth.

One engine keeps every view of the cache, so all methods decode at a depth from the same prefilled text. A repetition runs
each method once, one after another, and measures the read bandwidth between them. A speed-up uses only runs of one
repetition at one bandwidth. Decoding is the loop of `quantspec run`, sampled at temperature 1 with replay, as greedy text
of a small model repeats itself and would inflate acceptance. Within a repetition all methods share the seed, so methods
with the same target must emit the same tokens; otherwise it is an error. With rejection, which keeps the distribution and
not the text, every method emits its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import __version__, hub, output, render, report
from ..errors import DoesNotFitError, QuantspecError, UsageError, interrupted, native_errors, one_line
from ..lists import numbers
from ..model import Model
from ..signals import SIGNALS
from .grid import Arguments, check_fits, models_of, read_grid, read_text, tests, tokens_of
from .measure import Bench, is_widened
from .tables import Csv, Decoding, Json, JsonLines, Kernels, Markdown, model_cell, sink_of, test_cell, writer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..options import EngineOptions

# Default depths of `bench kernels`, and the most rows of a step it accepts.
KERNEL_DEPTHS = [4096, 32_768, 131_072]
ROWS_MAX = 256


def bench(arguments: Arguments, options: EngineOptions) -> output.Done:
    """Measures and prints as it goes."""
    grid = read_grid(arguments, options)
    render.warn_of_threads(options.threads)
    models = models_of(arguments.model)
    inputs = [arguments.prompt, *hub.files_on_disk(*models, arguments.draft_model)]
    with (
        output.opened(arguments.output, inputs) as file,
        report.opened(arguments.report, inputs, arguments.output) as page,
    ):
        sink = sink_of(file, as_json=arguments.as_json)
        name, text = read_text(arguments)
        opened = [
            Model.open(
                model,
                revision=arguments.revision,
                offline=arguments.offline,
                progress=render.on_terminal(),
                draft_model=arguments.draft_model,
            )
            for model in models
        ]
        tokens = [tokens_of(model, name, text, grid) for model in opened]
        if len(opened) > 1:
            # A single model is refused before its rows in any case.
            for model in opened:
                check_fits(model, grid, arguments, options)
        widened = [is_widened(model) for model in opened]
        memory: dict[str, dict[str, Any]] = {}
        measured = (
            row
            for model, ids, wide in zip(opened, tokens, widened, strict=True)
            for row in Bench(model, ids, grid, arguments, options, widened=wide, memory=memory).rows()
        )
        texts = {
            "model": [model_cell(model.name, widened=wide) for model, wide in zip(opened, widened, strict=True)],
            "method": ["any", *(variant.name for variant in grid.variants)],
            "test": map(test_cell, tests(grid, ragged=arguments.ragged)),
        }
        rows, ended = _write(measured, writer(arguments.output_format, Decoding, sink, texts), sink)
        if page is not None:
            failure = output.written(page, report.bench(rows, memory))
            ended = ended or failure
    return _done(arguments, rows, ended)


def _write(
    measured: Iterable[Mapping[str, Any]], table: Markdown | Csv | Json | JsonLines, sink: output.Sink
) -> tuple[list[Mapping[str, Any]], BaseException | None]:
    """Writes measurements as they arrive. Returns the finished ones and the exception that ended them early, or the error of
    a copy; raises it if none is finished.
    """
    failures: list[QuantspecError] = []
    ended: BaseException | None = None
    rows: list[Mapping[str, Any]] = []
    try:
        for row in output.until_failure(measured, failures):
            table.row(row)
            rows.append(row)
    except KeyboardInterrupt as interrupt:
        ended = interrupt
    ended = ended or next(iter(failures), None)
    if ended is not None and not rows:
        raise ended
    with SIGNALS.held():
        table.close()
        unwritten = sink.complete() if isinstance(sink, output.Copy) else None
    return rows, ended or unwritten


def _done(arguments: Arguments, rows: list[Mapping[str, Any]], ended: BaseException | None) -> output.Done:
    """The document of `--json`, if requested; raises the exception that ended the measurements, with the finished ones."""
    if ended is None:
        return output.Done(document=rows if arguments.as_json else None)
    if isinstance(ended, KeyboardInterrupt):
        ended = interrupted(SIGNALS.number)
    if isinstance(ended, QuantspecError):
        ended.kept = {"results": rows}
    raise ended


def kernels(arguments: Arguments, options: EngineOptions, rows: str, *, depths: str | None) -> output.Done:
    """Times the kernels of a GPU at the shapes of each model. Default `depths` are those of `KERNEL_DEPTHS` within the
    model's context.
    """
    counts = [n for n in numbers("--rows", rows) if n > 0]
    asked = None if depths is None else numbers("-d", depths)
    if asked is not None and 0 in asked:
        raise UsageError(
            f"-d is {depths}", "give depths of at least 1: attention is timed after that many tokens", option="-d"
        )
    if not counts or max(counts) > ROWS_MAX:
        raise UsageError(f"--rows is {rows}", f"use whole numbers, 1 to {ROWS_MAX}", option="--rows")
    models = models_of(arguments.model)
    with output.opened(arguments.output, hub.files_on_disk(*models)) as file:
        sink = sink_of(file, as_json=arguments.as_json)
        opened = [
            Model.open(name, revision=arguments.revision, offline=arguments.offline, progress=render.on_terminal())
            for name in models
        ]
        contexts = [_kernel_depths(model, asked) for model in opened]
        measured = (
            row
            for model, depths_of_it in zip(opened, contexts, strict=True)
            for row in _kernels(model, options, depths_of_it, counts)
        )
        done, ended = _write(measured, writer(arguments.output_format, Kernels, sink), sink)
    return _done(arguments, done, ended)


def _kernel_depths(model: Model, asked: Sequence[int] | None) -> list[int]:
    if asked is None:
        return [depth for depth in KERNEL_DEPTHS if depth <= model.context] or [model.context]
    if max(asked) > model.context:
        raise DoesNotFitError(
            f"depth {max(asked)} exceeds the context of {model.name}, {model.context}",
            f"lower -d to at most {model.context}",
        )
    return list(asked)


def _kernels(
    model: Model, options: EngineOptions, depths: Sequence[int], rows: Sequence[int]
) -> Iterator[dict[str, Any]]:
    from .. import _native

    with native_errors():
        device, device_name, read, measured = _native.kernels(
            str(model.directory), device=options.device, contexts=depths, rows=rows
        )
    render.note(f"{device}: {one_line(device_name)}, reads {render.number(read / 1e9)} GB/s")
    about = {"quantspec": __version__, "model": model.name, "device": device, "device_name": device_name}
    for row in measured:
        yield about | {"test": "kernel"} | row
