"""Output for people on stderr: statistics, notes, progress. Answers never pass through here."""

from __future__ import annotations

import io
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from .errors import one_line
from .options import ACCEPTANCE, KV_ROUNDINGS, METHODS
from .output import redirect_to_null

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rich.console import Console

    from .engine import Engine, Statistics
    from .generation import Generation
    from .model import Model
    from .options import EngineOptions
    from .prompts import Document

    OnProgress = Callable[[int, int], object]


class _Stderr(io.TextIOBase):
    """Standard error for rich. A reader or terminal that went away, or a full disk, must not lose the answer: the rest of
    the messages is dropped.
    """

    def __init__(self) -> None:
        # While rich redraws a terminal, `sys.stderr` is rich's own.
        self._file: TextIO = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
        self._lost = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._file.encoding

    def isatty(self) -> bool:
        return self._file.isatty()

    def write(self, text: str) -> int:
        try:
            return len(text) if self._lost else self._file.write(text)
        except OSError as error:
            return self._lose(error, len(text))

    def flush(self) -> None:
        try:
            if not self._lost:
                self._file.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError, written: int = 0) -> int:
        self._lost = True
        if isinstance(error, BrokenPipeError):
            redirect_to_null(self._file)
        return written


def console() -> Console:
    """Standard error: colour on a terminal unless NO_COLOR, lines not wrapped elsewhere."""
    from rich.console import Console

    return Console(file=cast("TextIO", _Stderr()), highlight=False, soft_wrap=True, markup=False)


def note(text: str) -> None:
    """Prints one line to stderr. Failure is ignored: the answer goes elsewhere."""
    console().print(text, style="dim")


def processors() -> int:
    """Processors this process may use: fewer than the machine's under taskset or in a container."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def warn_of_threads(threads: int | None) -> None:
    """Warns if there are more workers than processors, which then wait for each other."""
    if threads is not None and threads > (usable := processors()):
        note(f"warning: {threads} threads on {count(usable, 'processor')} wait for each other; use --threads {usable}")


def warn_of_documents(documents: Iterable[Document]) -> None:
    """Warns about missing or doubtful text."""
    for document in documents:
        warn_of_document(document.name, document.warnings)


def warn_of_document(name: str, warnings: Iterable[str]) -> None:
    """Warns about missing or doubtful text of a document."""
    for warning in warnings:
        note(f"warning: {one_line(name)}: {warning}")


def errors_of_documents(documents: Iterable[Document]) -> bool:
    """Prints the errors of documents that are not answered; False if there are none."""
    errors = [document.error for document in documents if document.error is not None]
    for error in errors:
        console().print(error.render())
    return bool(errors)


def note_of_template(model: Model, instruction: str | None, system_prompt: str | None) -> None:
    """Notes that a model without a chat template is given an instruction."""
    if model.chat_template is None and (instruction is not None or system_prompt is not None):
        note("the model has no chat template, so it continues the document and the instruction as plain text")


def note_of_drafts(info: dict[str, Any]) -> None:
    """Notes problems with the cache of draft weights."""
    if info.get("note"):
        note(f"warning: {one_line(info['note'])}")


def note_of_prompts(engine: Engine) -> None:
    """Notes problems with the prompt cache."""
    if text := engine.prompt_cache_note():
        note(f"warning: {one_line(text)}")


def note_of_weights(asked: str, model: Model, info: dict[str, Any]) -> None:
    """Notes the weights that `auto` chose if they are not the checkpoint's, and that quantised ones are dequantised."""
    if model.info["quantised"] and info["weights"] == "checkpoint":
        note("the model's quantised weights are dequantised; --weights int8 or int4 takes less memory and time")
    if asked == "auto" and info["weights"] != "checkpoint":
        note(f"weights: {info['weights']}, because the checkpoint's do not fit into memory; they define the text")


def note_of_emulation(methods: Iterable[str]) -> None:
    """Notes that a method's 4-bit activations save no time: no kernel uses INT4 matrix instructions."""
    if any(method.partition("+")[0] == "qspec" for method in methods):
        note(
            "qspec's 4-bit activations are emulated: its draft steps are no faster than those of w4; "
            "quantspec bench --methods w4,qspec measures both"
        )


def note_of_idle(chosen: EngineOptions, temperature: float) -> None:
    """Notes settings of drafts that have no effect on any draft of this run. Those that no run with the method uses are
    refused.
    """
    if chosen.gamma == 0 and chosen.draft_pages not in (None, "all"):
        note("no effect: --draft-pages, as gamma 0 drafts nothing")
    if chosen.accept != ACCEPTANCE[0] and METHODS[chosen.method].drafts and temperature == 0:
        note(f"no effect: --accept {chosen.accept}, as temperature 0 is greedy; --temperature 1 samples")


def statistics(engine: Engine, names: Sequence[str], answers: Sequence[Generation]) -> None:
    """Statistics of a run: prompts, speed, speculation, memory."""
    for line in statistics_lines(engine.info, engine.statistics(), names, answers):
        note(line)


def statistics_lines(
    info: dict[str, Any], stats: Statistics, names: Sequence[str], answers: Sequence[Generation]
) -> list[str]:
    """The lines of `statistics`."""
    lines = [
        f"{name}: {count(answer.prompt_tokens, 'prompt token')}, {count(len(answer.tokens), 'new token')} "
        f"({answer.stop_reason})"
        for name, answer in zip(names, answers, strict=True)
    ]
    lines.append(
        f"load {seconds(stats['load_s'])}{' with cached draft weights' if info.get('cached_drafts') else ''}, "
        f"prefill {seconds(stats['prefill_s'])} ({rate(stats['prefill_tokens_per_s'])}), "
        f"decode {seconds(stats['decode_s'])} ({rate(stats['decode_tokens_per_s'])})"
    )
    drafted = stats["drafted_tokens"]
    if drafted:
        lines.append(
            f"gamma {number(stats['gamma_mean'])} on average over {count(stats['rounds'], 'round')}, "
            f"accepted {stats['accepted_tokens']:,} of {drafted:,} drafted ({percent(stats['acceptance_rate'])}), "
            f"mean acceptance length {number(stats['mean_acceptance_length'])}"
        )
    else:
        lines.append(f"no speculation: {count(stats['rounds'], 'round')} of one token")
    shares = sorted(stats.get("by_method", {}).items(), key=lambda item: -item[1]["rounds"])
    if shares:
        lines.append("rounds by method: " + ", ".join(f"{name} {share['rounds']:,}" for name, share in shares))
    cache = stats["cache_upper_bytes"] + stats["cache_lower_bytes"] + stats.get("cache_full_bytes", 0)
    precise = "" if info["draft_precision"] == "none" else f" ({info['draft_precision']} in 8 bits)"
    lines.append(
        f"weights {size(stats['weights_bytes'])}, draft weights {size(stats['draft_weights_bytes'])}{precise}, "
        f"cache {size(cache)}, buffer {size(stats['buffer_bytes'])}, "
        f"peak {size(stats['peak_bytes'])} (planned {size(stats['planned_bytes'])})"
    )
    simd = f" ({info['simd']})" if info.get("simd") else ""
    lines.append(f"{info['device']}: {info['device_name']}{simd}")
    return lines


def seconds(value: float | None) -> str:
    """A time, three significant digits of milliseconds, four of seconds."""
    if value is None:
        return "-"
    # Thresholds at which the digits would round up to an exponent.
    if value < 0.9995:
        return f"{round(value * 1000, 3):.3g} ms"
    return f"{value:.4g} s" if value < 999.95 else f"{value:,.0f} s"


def rate(value: float | None) -> str:
    """A speed in tokens per second."""
    return "-" if value is None else f"{number(value)} tokens/s"


def number(value: float | None) -> str:
    """Three significant digits, thousands separated."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def rounding(found: Mapping[str, Any]) -> str:
    """The cache of a document of `eval`: the groups of an ablation, and the rounding; empty for the default."""
    if "ablation" in found:
        keys, values, group, codes = (found["ablation"][name] for name in ("k_axis", "v_axis", "group", "kv_rounding"))
        return f"keys by {keys}, values by {values}, groups of {group}, rounding {codes}"
    return "" if found["kv_rounding"] == KV_ROUNDINGS[0] else f"rounding {found['kv_rounding']}"


def with_spread(mean: float, deviation: float, *, digits: int = 3) -> str:
    """A mean with its standard deviation, which is 0 if there is one repetition and so no spread."""
    return f"{mean:.{digits}f}" + (f" ± {deviation:.{digits}f}" if deviation else "")


def percent(value: float | None) -> str:
    """A share."""
    return "-" if value is None else f"{value:.1%}"


def size(value: int | None) -> str:
    """Bytes in decimal units."""
    if value is None:
        return "-"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        # Values that round to 1,000 units become 1 of the next unit.
        if value >= 0.9995 * scale:
            return f"{number(value / scale)} {unit}"
    return f"{value} B"


def count(value: int, what: str) -> str:
    """A number of things: 1 token, 2,000 tokens."""
    return f"{value:,} {what}" + ("" if value == 1 else "s")


def on_terminal() -> bool:
    """True if stderr is a terminal that can be redrawn."""
    return sys.stderr.isatty() and os.environ.get("TERM", "").lower() not in {"dumb", "unknown"}


@contextmanager
def progress(what: str, *, shown: bool, layers: int | None = None) -> Iterator[OnProgress | None]:
    """A bar on stderr while the body runs; yields a callable for (done, total), or None if nothing is shown. With `layers`,
    where one token in one layer counts as 1, it also shows tokens/s and the time left.
    """
    with phases(what, shown=shown, layers=layers) as (on_progress,):
        yield on_progress


@contextmanager
def phases(*names: str, shown: bool, layers: int | None = None) -> Iterator[Sequence[OnProgress | None]]:
    """A bar for several consecutive phases of work; yields a callable, or None, for each."""
    if not shown or not on_terminal():
        yield [None] * len(names)
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    seen: list[dict[int, int]] = [{} for _ in names]

    class Bar(Progress):
        def get_renderables(self) -> Any:
            for name, steps in zip(names, seen, strict=True):
                if steps:
                    done = max(steps)
                    self.update(task, description=name, completed=done, total=steps[done])
            return super().get_renderables()

    class Rate(TextColumn):
        """Tokens per second from the start of the work."""

        def render(self, task: Any) -> Any:
            done, elapsed = task.completed / (layers or 1), task.elapsed or 0
            self.text_format = rate(done / elapsed) if done and elapsed else ""
            return super().render(task)

    columns = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
    columns += [Rate(""), TimeRemainingColumn(compact=True), TextColumn("left")] if layers else [TimeElapsedColumn()]
    bar = Bar(*columns, console=console(), transient=True)
    task = bar.add_task(names[0], total=None)
    try:
        # Not `with bar`: Ctrl-C during its start would leave it on the terminal, redrawn repeatedly.
        bar.start()
        # A built-in's method: a Python callable could raise a pending Ctrl-C inside the engine's callback, where it would be
        # lost.
        yield [steps.__setitem__ for steps in seen]
    finally:
        bar.stop()
