"""`quantspec bench`: prefill and decoding at depth, in llama-bench's grammar, compared with memory bandwidth.

One engine keeps every view of the cache, so all methods decode at a depth from the same prefilled text. A repetition runs
each method once, one after another, and measures the read bandwidth between them. A speed-up uses only runs of one
repetition at one bandwidth. Decoding is the loop of `quantspec run`, sampled at temperature 1 with replay, as greedy text
of a small model repeats itself and would inflate acceptance. Within a repetition all methods share the seed, so methods
with the same target must emit the same tokens; otherwise it is an error. With rejection, which keeps the distribution and
not the text, every method emits its own.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from . import __version__, files, loop, output, predict, prompts, render, report, settings
from .engine import Model
from .errors import (
    DoesNotFitError,
    InputError,
    InternalError,
    ModelError,
    QuantspecError,
    UsageError,
    interrupted,
    native_errors,
    one_line,
)
from .options import GAMMA_MAX, KV_TARGETS, METHODS, PAGES_MAX, PAGES_MIN, SEED_MAX, whole
from .options import Method as Drafting
from .signals import SIGNALS
from .text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from . import _native
    from .options import EngineOptions

# The novel whose beginning is the sample of `eval` and `selftest`: 230,000 tokens, enough for every depth.
BOOK = Path(__file__).with_name("book.txt.gz")
# Default depths of `bench kernels`, and the most rows of a step it accepts.
KERNEL_DEPTHS = [4096, 32_768, 131_072]
ROWS_MAX = 64
# More than a mean needs.
REPETITIONS_MAX = 10_000
# Most measurements of one option; more are a typing error (0-100000).
LIST_MAX = 256
# Warm-up tokens per method and depth: page faults, and the processor's clock.
WARM_UP = 8
# Warm-up tokens of a prompt, for the same reason.
WARM_UP_PROMPT = 64
# More sequences than any memory holds, and small enough for the engine's integers.
BATCH_MAX = 4096
# Two bandwidths count as equal if they differ by less: repeated readings of quiet memory differ by 3 %, its two speeds by 70
# %.
STEADY = 0.1
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

Gamma = int | Literal["auto"]
Pages = int | Literal["all", "auto"]


@dataclass(frozen=True)
class Method:
    """A decoding method with its settings.

    Attributes:
        name: a name of `options.METHODS`.
        kv_target: the target's view of the cache.
        gamma: drafted tokens per round; 0 for "ar".
        draft_pages: pages a draft reads per KV head.
    """

    name: str
    kv_target: str
    gamma: Gamma = 0
    draft_pages: Pages = "all"

    def native(self) -> dict[str, Any]:
        """Keyword arguments of `_native.Engine.configure`."""
        return {
            "method": self.name,
            "kv_target": self.kv_target,
            "gamma": None if self.gamma == "auto" else self.gamma,
            "draft_pages": None if self.draft_pages == "all" else self.draft_pages,
        }


BASELINE = Method("ar", "fp16")


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of one `quantspec bench`; lists as typed."""

    model: str | None
    revision: str | None
    offline: bool
    prompt: str | None
    n_prompt: str
    n_gen: str
    n_depth: str
    batch: str
    gamma: str
    draft_pages: str
    draft_model: str | None
    methods: str
    repetitions: int
    seed: int
    output_format: str
    output: str | None
    report: str | None
    as_json: bool


@dataclass(frozen=True)
class Grid:
    """A request with its lists read."""

    n_prompt: list[int]
    n_gen: list[int]
    n_depth: list[int]
    batches: list[int]
    methods: list[Method]

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence: a decoded one has at least one token of text before it."""
        decoded = max(max(depth, 1) + tokens + 1 for depth in self.n_depth for tokens in self.n_gen or [0])
        # A prefill yields a token, too.
        return max(decoded, max(self.n_depth) + max(self.n_prompt, default=0) + 1)

    @property
    def text_tokens(self) -> int:
        """Tokens of text that are read."""
        return max(self.n_depth) + max([*self.n_prompt, 2])


@dataclass
class Sample:
    """One run of one method.

    Attributes:
        seconds: wall time of the decoding, including the loop.
        read_bytes: bytes its steps had to read.
        bandwidths: GB/s read before and after.
        stats: the engine's counters of this run.
        tokens: emitted tokens of each sequence.
    """

    seconds: float
    read_bytes: float
    bandwidths: tuple[float, float]
    stats: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[Sequence[int]] = ()

    @property
    def bandwidth(self) -> float:
        """Mean read bandwidth around the run."""
        return statistics.fmean(self.bandwidths)

    @property
    def steady(self) -> bool:
        """True if the memory had the same speed before and after."""
        return _same(*self.bandwidths)


def bench(request: Request, options: EngineOptions) -> output.Done:
    """Measures and prints as it goes."""
    grid = read_grid(request)
    render.warn_of_threads(options.threads)
    inputs = [] if request.prompt is None else [request.prompt]
    with (
        output.opened(request.output, inputs) as file,
        report.opened(request.report, inputs, request.output) as page,
    ):
        sink = sink_of(file, as_json=request.as_json)
        name, text = _text(request)
        opened = [
            Model.open(model, revision=request.revision, offline=request.offline, progress=render.on_terminal())
            for model in _models(request.model)
        ]
        tokens = [_tokens(model, name, text, grid) for model in opened]
        if len(opened) > 1:
            # A single model is refused before its rows in any case.
            for model in opened:
                _check_fits(model, grid, request, options)
        memory: dict[str, dict[str, Any]] = {}
        measured = (
            row
            for model, ids in zip(opened, tokens, strict=True)
            for row in Bench(model, ids, grid, request, options, memory=memory).rows()
        )
        rows, ended = _write(measured, writer(request.output_format, Decoding, sink))
        if page is not None:
            page.write(report.bench(rows, memory))
    return _done(request, rows, ended)


def sink_of(file: output.AtomicFile | None, *, as_json: bool) -> output.Sink:
    """Destination of the table; the document of `--json` replaces it on standard output."""
    if file is not None and not as_json:
        return file
    stdout = output.Stdout()  # raises now if it is closed
    return file or (output.Nowhere() if as_json else stdout)


def _write(
    measured: Iterable[Mapping[str, Any]], table: Markdown | Csv | Json | JsonLines
) -> tuple[list[Mapping[str, Any]], BaseException | None]:
    """Writes measurements as they arrive. Returns the finished ones and the exception that ended them early; raises it if
    none is finished.
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
    return rows, ended


def _done(request: Request, rows: list[Mapping[str, Any]], ended: BaseException | None) -> output.Done:
    """The document of `--json`, if requested; raises the exception that ended the measurements, with the finished ones."""
    if ended is None:
        return output.Done(document=rows if request.as_json else None)
    if isinstance(ended, KeyboardInterrupt):
        ended = interrupted(SIGNALS.number)
    if isinstance(ended, QuantspecError):
        ended.kept = {"results": rows}
    raise ended


def kernels(request: Request, options: EngineOptions, rows: str, *, depths: str | None) -> output.Done:
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
    with output.opened(request.output, ()) as file:
        sink = sink_of(file, as_json=request.as_json)
        opened = [
            Model.open(name, revision=request.revision, offline=request.offline, progress=render.on_terminal())
            for name in _models(request.model)
        ]
        contexts = [_kernel_depths(model, asked) for model in opened]
        measured = (
            row
            for model, depths_of_it in zip(opened, contexts, strict=True)
            for row in _kernels(model, options, depths_of_it, counts)
        )
        done, ended = _write(measured, writer(request.output_format, Kernels, sink))
    return _done(request, done, ended)


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
    from . import _native

    with native_errors():
        device, device_name, read, measured = _native.kernels(
            str(model.directory), device=options.device, contexts=depths, rows=rows
        )
    render.note(f"{device}: {one_line(device_name)}, reads {render.number(read / 1e9)} GB/s")
    about = {"quantspec": __version__, "model": model.name, "device": device, "device_name": device_name}
    for row in measured:
        yield about | {"test": "kernel"} | row


# Lists ---------------------------------------------------------------------------------------------------------------


def read_grid(request: Request) -> Grid:
    """The lists of a request, or an error about the wrong item."""
    whole("repetitions", request.repetitions, 1, REPETITIONS_MAX)
    # Every repetition has the next seed.
    if not 0 <= request.seed <= SEED_MAX - request.repetitions:
        most = SEED_MAX - request.repetitions
        raise UsageError(f"seed is {request.seed}", f"use a whole number, 0 to {most}", option="seed")
    grid = Grid(
        n_prompt=[n for n in numbers("-p", request.n_prompt) if n > 0],
        n_gen=[n for n in numbers("-n", request.n_gen) if n > 0],
        n_depth=numbers("-d", request.n_depth),
        batches=_batches(request.batch),
        methods=methods(
            request.methods,
            numbers_or("--gamma", request.gamma, ("auto",), 0, GAMMA_MAX),
            numbers_or("--draft-pages", request.draft_pages, ("all", "auto"), PAGES_MIN, PAGES_MAX),
        ),
    )
    drafting = [method.name for method in grid.methods if METHODS[method.name].draft_model]
    chooses = any(METHODS[method.name].chooses for method in grid.methods)
    if (drafting and request.draft_model is None) or (request.draft_model is not None and not drafting and not chooses):
        raise UsageError(
            f"--methods has {drafting[0]}, but there is no draft model"
            if drafting
            else f"--draft-model is {request.draft_model}, but no method of --methods uses it",
            "give both --draft-model and --methods ...,draft-model or auto, or neither",
            option="draft_model",
        )
    if not grid.n_prompt and not grid.n_gen:
        raise UsageError("nothing to measure: -p and -n are 0", "give -p N for prefill, -n N for decoding, or both")
    return grid


def _batches(given: str) -> list[int]:
    found = numbers("--batch", given)
    if not all(1 <= batch <= BATCH_MAX for batch in found):
        raise UsageError(f"--batch is {given}", f"use whole numbers, 1 to {BATCH_MAX}", option="--batch")
    return found


def items(flag: str, given: str) -> list[str]:
    """The items of a comma list."""
    found = [item.strip() for item in given.split(",")]
    if not all(found):
        raise UsageError(f"{flag} has an empty item in {given!r}", "separate the values by single commas", option=flag)
    return found


def numbers(flag: str, given: str) -> list[int]:
    """The numbers of a list of `N`, `a-b`, `a-b+step` and `a-b*factor`, in order, each once."""
    hint = f"use whole numbers and ranges: {flag} 0,512 or 0-4096+1024 or 1-64*2"
    return _each_once(flag, given, lambda item: _range(flag, item, hint))


def numbers_or(flag: str, given: str, words: Sequence[str], least: int, most: int) -> list[Any]:
    """As `numbers`, with limits and additional words: `1-4,auto`."""
    return _each_once(flag, given, lambda item: _number_or(flag, item, words, least, most))


def _each_once(flag: str, given: str, values: Callable[[str], Iterable[Any]]) -> list[Any]:
    found: dict[Any, None] = {}
    for item in items(flag, given):
        for value in values(item):
            found[value] = None
            if len(found) > LIST_MAX:
                raise UsageError(
                    f"{flag} {item} is more than {LIST_MAX} values", "use a larger step: a-b+step", option=flag
                )
    return list(found)


def _range(flag: str, item: str, hint: str) -> Iterator[int]:
    def whole(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 9):
            raise UsageError(f"{flag} has {item!r}", hint, option=flag)
        return int(text)

    first, dash, rest = item.partition("-")
    if not dash:
        yield whole(item)
        return
    last, operator, step = next((parts for sign in "+*" if (parts := rest.partition(sign))[1]), (rest, "+", "1"))
    value, end, by = whole(first), whole(last), whole(step)
    if end < value or (operator == "+" and by < 1) or (operator == "*" and (by < 2 or value < 1)):
        raise UsageError(
            f"the range {item} of {flag} never ends or is empty",
            "use a-b+step or a-b*factor, with a up to b",
            option=flag,
        )
    while value <= end:
        yield value
        value = value + by if operator == "+" else value * by


def _number_or(flag: str, item: str, words: Sequence[str], least: int, most: int) -> Iterator[Any]:
    def hint(*, too_large: bool) -> str:
        bounds = f"{least} to {most}" if most < PAGES_MAX or too_large else f"at least {least}"
        return f"use whole numbers, {bounds}, ranges of them such as 2-8*2, or {' or '.join(words)}"

    if item in words:
        yield item
        return
    if "-" in item:
        for number in _range(flag, item, hint(too_large=False)):
            if not least <= number <= most:
                raise UsageError(f"{flag} has {item!r}", hint(too_large=number > most), option=flag)
            yield number
        return
    # Python does not parse numbers with thousands of digits.
    digits = (item.lstrip("0") or "0") if item.isascii() and item.isdigit() else ""
    too_large = len(digits) > 12 or (digits != "" and int(digits) > most)
    if not digits or too_large or int(digits) < least:
        raise UsageError(f"{flag} has {item!r}", hint(too_large=too_large), option=flag)
    yield int(digits)


def methods(given: str, gammas: Sequence[Gamma], pages: Sequence[Pages]) -> list[Method]:
    """The methods of a list of `METHOD` or `METHOD-KV`, combined with every γ and page count if they draft."""
    found: dict[Method, None] = {}
    for item in items("--methods", given):
        name, target = item, KV_TARGETS[0]
        if item not in METHODS:
            name, _, target = item.rpartition("-")
        if name not in METHODS or target not in KV_TARGETS:
            raise UsageError(
                f"--methods has {item!r}",
                f"use {', '.join(METHODS)}, each with -{', -'.join(KV_TARGETS)} or without",
                option="--methods",
            )
        method = METHODS[name]
        of_gamma: Sequence[Gamma] = gammas if method.drafts else [0]
        of_pages: Sequence[Pages] = pages if method.draft_view else ["all"]
        if method.chooses or method.pages is not None:
            of_pages = [count for count in pages if count != "all"] or [method.pages or "auto"]
        found.update((Method(name, target, gamma, count), None) for gamma in of_gamma for count in of_pages)
    return list(found)


def _models(given: str | None) -> list[str | None]:
    """The models of a comma list; a directory may have a comma in its name."""
    if given is None or files.status(given) is not None:
        return [given]
    return [*items("--model", given)]


# Text ----------------------------------------------------------------------------------------------------------------


def _text(request: Request) -> tuple[str, str]:
    if request.prompt is None:
        return "the shipped book", gzip.decompress(BOOK.read_bytes()).decode()
    document = prompts.read(request.prompt)
    render.warn_of_documents([document])
    return document.name, document.text


def _tokens(model: Model, name: str, text: str, grid: Grid) -> list[int]:
    """The tokens of the text to use; an error if model or text is too short."""
    if grid.capacity > model.context:
        raise DoesNotFitError(
            f"depth {max(grid.n_depth)} with its tests takes {grid.capacity} tokens, the context of {model.name} is "
            f"{model.context}",
            _room(grid, model.context),
        )
    ids = model.tokenizer.encode_start(text, grid.text_tokens)
    if len(ids) < grid.text_tokens:
        raise InputError(
            f"{name} has {len(ids)} tokens, the deepest test reads {grid.text_tokens}",
            "give a longer text with --prompt, or lower -d and -p",
        )
    return ids


def _room(grid: Grid, context: int) -> str:
    """A hint: what to lower, and to which value, so that a grid fits a context."""
    deepest = max(grid.n_depth)
    possible = max(context - grid.capacity + deepest, 0)
    if deepest > 0 and replace(grid, n_depth=[possible]).capacity <= context:
        return f"lower -d to at most {possible}"
    # If the tests alone are too long: the room after that depth, or without any depth.
    depth = deepest if deepest < context - 1 else 0
    room = {"-p": (grid.n_prompt, context - depth - 1), "-n": (grid.n_gen, context - max(depth, 1) - 1)}
    lower = [f"{flag} to at most {most}" for flag, (counts, most) in room.items() if max(counts, default=0) > most]
    return "lower " + " and ".join([*(["-d to 0"] if depth < deepest else []), *lower])


# Measuring -----------------------------------------------------------------------------------------------------------


def _check_fits(model: Model, grid: Grid, request: Request, options: EngineOptions) -> None:
    """Refuses a model or sizes that the device or its memory refuses, before anything is read."""
    from . import _native

    try:
        draft_model = model.draft_model(request.draft_model)
        with native_errors():
            _native.planned(
                str(model.directory), capacity=grid.capacity, draft_model=draft_model, **_engine_options(options)
            )
    except (DoesNotFitError, ModelError) as error:
        raise type(error)(f"{model.name}: {error.message}", error.hint) from error


def _engine_options(options: EngineOptions) -> dict[str, Any]:
    """The engine options that apply to every method."""
    native = options.native()
    return {
        name: native[name]
        for name in ("device", "threads", "weights", "kv_rounding", "draft_precision", "page_choice", "accept")
    }


class Bench:
    """The measurements of one model."""

    def __init__(
        self,
        model: Model,
        ids: Sequence[int],
        grid: Grid,
        request: Request,
        options: EngineOptions,
        *,
        memory: dict[str, dict[str, Any]],
    ) -> None:
        """Loads the model, with every plane of the cache and the draft weights; records its memory in `memory`."""
        from . import _native

        self._native = _native
        self._model, self._ids, self._grid, self._request = model, ids, grid, request
        self._draft_model = model.draft_model(request.draft_model, progress=render.on_terminal())
        with render.progress("loading weights", shown=True) as on_loading, native_errors():
            self._engine = _native.Engine(
                str(model.directory),
                capacity=grid.capacity,
                slots=max(grid.batches) if grid.n_gen else 1,
                **_engine_options(options),
                every_view=True,
                draft_model=self._draft_model,
                draft_cache=settings.native_draft_cache(),
                on_loading=on_loading,
            )
            memory[model.name] = self._engine.stats()
            self._draft_bytes = int(memory[model.name]["draft_weights_bytes"])
            self._weights, self._precision = self._engine.info["weights"], self._engine.info["draft_precision"]
        self._page_choice = options.choice_of_pages
        self._accept = options.accept
        self._info = self._engine.info
        render.note_of_drafts(self._info)
        self._bandwidth_now = 0.0
        config = model.directory / "config.json"  # a GGUF file has none
        self._widened = files.is_file(config) and "widened" in json.loads(files.read(config))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields all measurements, as each depth completes."""
        for depth in self._grid.n_depth:
            for tokens in self._grid.n_prompt:
                yield self._prefill(depth, tokens)
            for tokens, batch in itertools.product(self._grid.n_gen, self._grid.batches):
                yield from self._decode(depth, tokens, batch)

    def _bandwidth(self) -> float:
        """GB/s now, of the engine's device."""
        return self._engine.read_gb_per_s()

    def _prefill(self, depth: int, tokens: int) -> dict[str, Any]:
        """Cost of `tokens` more of a prompt after `depth`: their share of the prefill of both."""
        samples = []
        read = self._prefill_bytes(depth, tokens)
        with render.progress(f"prefill {tokens} at {depth}", shown=True) as on_prefill, native_errors():
            slot = self._add(min(depth + tokens, WARM_UP_PROMPT), 1)
            self._engine.prefill(slot)
            self._engine.finish(slot)
            for _ in range(self._request.repetitions):
                before = self._bandwidth()
                slot = self._add(depth + tokens, 1)
                _, seconds = self._engine.prefill_timed(slot, depth, on_prefill)
                self._engine.finish(slot)
                samples.append(Sample(seconds, read, (before, self._bandwidth())))
        matrix, attention = predict.row_flops(self._model.info, depth + tokens / 2)
        row = self._row(samples, tokens, test="pp", n_prompt=tokens, n_gen=0, n_depth=depth)
        row["flops_per_token"] = matrix + attention
        # Prefill is in full precision, so it does not depend on the decoding method.
        return row | {"method": "any", "kv_target": "any", "gamma": 0, "draft_pages": "all"}

    def _decode(self, depth: int, tokens: int, batch: int) -> Iterator[dict[str, Any]]:
        """Decodes sequences together; each follows its own part of the text and emits the same number of tokens."""
        repetitions, grid = self._request.repetitions, self._grid
        with render.progress(f"reading {depth} tokens", shown=depth > 0) as on_prefill, native_errors():
            answers = Answers(self._engine, self._model, self._ids, depth, tokens, batch=batch, on_prefill=on_prefill)
        seen = self._traffic(answers.depth, answers.tokens)
        if self._draft_model is not None:
            seen["draft_model"] = self._traffic(answers.depth, answers.tokens, self._draft_model)
        samples: dict[Method, list[Sample]] = {method: [] for method in grid.methods}
        with render.progress(f"decoding at {depth}", shown=True) as tick, native_errors():
            for method in grid.methods:
                self._configure(method)
                answers.run(self._request.seed, min(WARM_UP, tokens))
            for repetition in range(repetitions):
                self._bandwidth_now = self._bandwidth()
                # In alternating direction, so that a drift of the machine affects all methods alike.
                for method in grid.methods[:: -1 if repetition % 2 else 1]:
                    samples[method].append(self._sample(method, answers, seen, repetition))
                    if tick:
                        tick(sum(map(len, samples.values())), repetitions * len(grid.methods))
                if self._accept == "replay":
                    _check_equal({method: runs[-1] for method, runs in samples.items()})
        answers.close()
        for method, runs in samples.items():
            row = self._row(runs, batch * tokens, batch=batch, test="tg", n_prompt=0, n_gen=tokens, n_depth=depth)
            row |= {"method": method.name, "kv_target": method.kv_target, "gamma": method.gamma}
            row |= {"draft_pages": method.draft_pages} | _speculation(runs) | _speedup(runs, samples.get(BASELINE))
            row["flops_per_token"] = self._decode_flops(method, seen, runs) / (batch * tokens)
            yield row

    def _configure(self, method: Method) -> None:
        self._engine.configure(page_choice=self._page_choice, **method.native())

    def _sample(self, method: Method, answers: Answers, seen: Mapping[str, Any], repetition: int) -> Sample:
        before = self._bandwidth_now
        self._configure(method)
        seconds, tokens = answers.run(self._request.seed + repetition)
        stats = self._engine.stats()
        # The draft of one sequence may end early; a batch's drafts are as long as its longest.
        steps = stats["drafted_tokens"] - stats["copied_tokens"] if len(tokens) == 1 else answers.draft_steps
        stats |= {"passes": answers.passes, "draft_steps": steps}
        # The bandwidth after a run is the bandwidth before the next.
        after = self._bandwidth_now = self._bandwidth()
        return Sample(seconds, self._decode_bytes(method, seen, stats), (before, after), stats, tokens)

    def _add(self, prompt_tokens: int, new_tokens: int) -> int:
        return self._engine.add(
            self._ids[:prompt_tokens], seed=self._request.seed, max_new_tokens=new_tokens, **SAMPLING
        )

    def _traffic(self, start: int, tokens: int, model: str | None = None) -> dict[str, Any]:
        """Bytes that steps at these positions read. Opens the checkpoint, so it must not be called between measurements."""
        with native_errors():
            return self._native.traffic(
                model or str(self._model.directory),
                start,
                tokens,
                self._weights,
                self._info["device"],
                draft_precision=self._precision,
            )

    def _prefill_bytes(self, depth: int, tokens: int) -> float:
        """Fewest bytes read by a prefill of `tokens` after `depth`: a layer's weights and the past once per block, the head
        once."""
        seen = self._traffic(depth, tokens)
        blocks = range(depth, depth + tokens, self._info["block_rows"])
        layers = seen["weights_bytes"] - seen["head_bytes"]
        read: float = len(blocks) * layers + sum(blocks) * seen["token_bytes"] + seen["head_bytes"]
        return read

    def _decode_bytes(self, method: Method, seen: Mapping[str, Any], stats: Mapping[str, Any]) -> float:
        """Bytes a run's verifications and drafts had to read: weights once for all sequences of a pass; per sequence the
        visible pages of the view and the recent tokens.
        """
        page, recent = _page_bytes(seen), seen["buffer_tokens"] * seen["token_bytes"]
        cache = seen["pages"] * page[method.kv_target] + recent
        read: float = stats["passes"] * seen["weights_bytes"] + stats["rounds"] * cache
        drafted = stats["drafted_tokens"] - stats["copied_tokens"]
        pages = stats.get("draft_pages_mean") if method.draft_pages == "auto" else method.draft_pages
        shares = {method.name: {"rounds": stats["rounds"], "drafted_tokens": drafted, "draft_pages_mean": pages}}
        # With several methods, each has its own bytes.
        for name, share in stats.get("by_method", shares).items():
            if METHODS[name].draft_view is not None and share["drafted_tokens"]:
                steps = stats["draft_steps"] * share["drafted_tokens"] / drafted
                read += self._drafted_bytes(METHODS[name], method.kv_target, seen, share, steps)
        return read

    def _drafted_bytes(
        self, drafts: Drafting, target: str, seen: Mapping[str, Any], share: Mapping[str, Any], steps: float
    ) -> float:
        """Bytes that the drafts of one method read in `steps` steps."""
        if drafts.draft_model:
            seen = seen["draft_model"]
        page, recent = _page_bytes(seen), seen["buffer_tokens"] * seen["token_bytes"]
        weights = (seen["draft_weights_bytes"] or self._draft_bytes) if drafts.draft_weights else seen["weights_bytes"]
        view = page[target if drafts.draft_view == "target" else str(drafts.draft_view)]
        asked = share["draft_pages_mean"]
        pages = seen["pages"] if asked == "all" else min(seen["pages"], asked or 0.0)
        read: float = steps * weights + share["drafted_tokens"] * (pages * view + recent)
        if pages < seen["pages"] and self._page_choice == "best" and drafts.pages is None:
            read += share["rounds"] * seen["pages"] * seen["page_bound_bytes"]
        return read

    def _decode_flops(self, method: Method, seen: Mapping[str, Any], runs: Sequence[Sample]) -> float:
        """Mean floating-point operations of a run: of all verified rows, and of rows with which the model itself drafted."""
        visible = seen["pages"] * predict.PAGE_TOKENS + seen["buffer_tokens"]
        matrix, attention = predict.row_flops(self._model.info, visible)
        drafts = METHODS[method.name].draft_view is not None and not METHODS[method.name].draft_model
        drafted = statistics.fmean(run.stats["drafted_tokens"] for run in runs)
        rounds = statistics.fmean(run.stats["rounds"] for run in runs)
        drafting = matrix + attention * (1.0 if method.draft_pages == "all" else self._pages_share(seen, runs))
        return (drafted + rounds) * (matrix + attention) + drafted * drafting * drafts

    @staticmethod
    def _pages_share(seen: Mapping[str, Any], runs: Sequence[Sample]) -> float:
        """Share of the visible tokens that a draft with selected pages reads."""
        mean = statistics.fmean(run.stats.get("draft_pages_mean") or 0.0 for run in runs)
        recent = seen["buffer_tokens"]
        read = min(mean, seen["pages"]) * predict.PAGE_TOKENS + recent
        share: float = read / max(seen["pages"] * predict.PAGE_TOKENS + recent, 1)
        return share

    def _row(self, samples: Sequence[Sample], tokens: int, **test: Any) -> dict[str, Any]:
        """Fields of every test."""
        times = [sample.seconds / tokens * 1e3 for sample in samples]
        bytes_per_token = statistics.fmean(sample.read_bytes for sample in samples) / tokens
        bandwidths = [sample.bandwidth for sample in samples]
        steady = [sample for sample in samples if sample.steady]
        milliseconds = statistics.fmean(times)
        return {
            "quantspec": __version__,
            "model": self._model.name,
            "widened": self._widened,
            "device": self._info["device"],
            "device_name": self._info["device_name"],
            "simd": self._info.get("simd"),
            "threads": self._info["threads"],
            "method": None,
            "weights": self._weights,
            "kv_target": None,
            "gamma": None,
            "draft_pages": None,
            "accept": self._accept,
            "batch": 1,
            **test,
            "ms_per_token": milliseconds,
            "ms_per_token_sd": statistics.stdev(times) if len(times) > 1 else 0.0,
            "tokens_per_s": 1e3 / milliseconds,
            "bytes_per_token": bytes_per_token,
            "gb_per_s": bytes_per_token / milliseconds / 1e6,
            "bandwidth_gb_per_s": statistics.fmean(bandwidths),
            "bandwidth_share": _share(steady),
            "bandwidth_steady_repetitions": len(steady),
            "acceptance_rate": None,
            "mean_acceptance_length": None,
            "repetitions": len(samples),
            "samples_ms_per_token": times,
            "samples_bandwidth_gb_per_s": bandwidths,
        }


class Answers:
    """Decodes repeatedly after the same texts, whose prefill is kept as long as the buffer allows.

    Attributes:
        depth: tokens of text before each answer.
        tokens: of each answer.
        passes: verifications of the last run, over all its sequences together.
        draft_steps: draft steps of the last run, likewise.
    """

    def __init__(
        self,
        engine: _native.Engine,
        model: Model,
        ids: Sequence[int],
        depth: int,
        tokens: int,
        *,
        batch: int,
        on_prefill: Callable[[int, int], object] | None = None,
    ) -> None:
        """Prefills. At depth 0 there is one token of text, as the first decoded token needs a predecessor."""
        self.depth, self.tokens = max(depth, 1), tokens
        self.passes = self.draft_steps = 0
        self._engine, self._model = engine, model
        self._on_prefill = on_prefill
        self._seed = 0
        # Each sequence begins elsewhere in the text, after the same first token, often a BOS.
        self._texts: dict[int, Sequence[int]] = {}
        for sequence in range(batch):
            start = 1 + sequence * (len(ids) - 1) // batch
            text = [*ids[:1], *ids[start:], *ids[1:start]][: self.depth + 1]
            self._texts[self._prefilled(text)] = text

    def run(self, seed: int, tokens: int | None = None) -> tuple[float, list[list[int]]]:
        """Decodes with the loop of `quantspec run`; returns seconds and emitted tokens. The text's own next token comes
        first."""
        self._seed = seed
        self.passes = self.draft_steps = 0
        # The given token counts as an answer's first.
        limit = (tokens or self.tokens) + 1
        answers = {slot: Text(self._model.tokenizer.token_bytes, limit=limit) for slot in self._texts}
        pieces = loop.decode(self, answers)
        for _ in self._texts:
            next(pieces)
        started = time.perf_counter()
        for _ in pieces:
            pass
        return time.perf_counter() - started, [answer.tokens for answer in answers.values()]

    def close(self) -> None:
        """Frees the slots."""
        for slot in self._texts:
            self._engine.finish(slot)

    # The interface that the loop uses.

    def prefill(self, slot: int, _on_progress: object = None) -> int:
        """Returns to the end of the text, with a new prefill if too much was decoded."""
        text = self._texts[slot]
        if not self._engine.restart(slot, text[-1], seed=self._seed, **SAMPLING):
            self._engine.finish(slot)
            if self._prefilled(text) != slot or not self._engine.restart(slot, text[-1], seed=self._seed, **SAMPLING):
                raise InternalError("a freshly prefilled prompt cannot be decoded", "please report this")
        return text[-1]

    def choose_gamma(self, slot: int) -> int:
        """The engine's."""
        return self._engine.choose_gamma(slot)

    def draft(self, gammas: Sequence[tuple[int, int]]) -> None:
        """The engine's."""
        self.draft_steps += max(gamma for _, gamma in gammas)
        self._engine.draft(gammas)

    def verify(self) -> list[tuple[int, list[int]]]:
        """The engine's."""
        self.passes += 1
        return self._engine.verify()

    def finish(self, slot: int) -> None:
        """Keeps the slot for the next run."""

    def _prefilled(self, text: Sequence[int]) -> int:
        slot = self._engine.add(text[:-1], seed=0, max_new_tokens=self.tokens + 1, **SAMPLING)
        self._engine.prefill(slot, self._on_prefill)
        return slot


def _page_bytes(seen: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of a page by view."""
    upper, lower = seen["upper_page_bytes"], seen["lower_page_bytes"]
    return {"int4": upper, "int8": upper + lower, "fp16": seen["full_page_bytes"]}


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= STEADY * max(one, other)


def _check_equal(runs: Mapping[Method, Sample]) -> None:
    """Checks that methods with the same target and seed emit the same tokens, so that the compared work is equal."""
    for method, run in runs.items():
        other = next(known for known in runs if known.kv_target == method.kv_target)
        if list(run.tokens) != list(runs[other].tokens):
            raise InternalError(
                f"{method.name} and {other.name} emitted different tokens from the {method.kv_target} target",
                "run quantspec selftest, and please report this",
            )


def _share(steady: Sequence[Sample]) -> float | None:
    """Share of the bytes that could have been read in that time; a slow repetition counts by its length, as in bytes per
    second."""
    readable = sum(sample.seconds * 1e9 * sample.bandwidth for sample in steady)
    return sum(sample.read_bytes for sample in steady) / readable if steady else None


def _speculation(runs: Sequence[Sample]) -> dict[str, Any]:
    """Statistics of drafting over all repetitions; times are means per round, which covers all sequences of a batch."""
    names = ("rounds", "drafted_tokens", "accepted_tokens", "passes", "draft_steps")
    total = {name: sum(run.stats[name] for run in runs) for name in names}
    spent = {name: sum(run.stats[name] for run in runs) for name in ("draft_s", "verify_s")}
    rounds, drafted, accepted, passes, steps = total.values()
    engine_s = spent["draft_s"] + spent["verify_s"]
    wall_s = sum(run.seconds for run in runs)
    return {
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / rounds if drafted else None,
        "acceptance_rate_per_position": _per_position(runs),
        **_by_method(runs),
        "gamma_mean": drafted / rounds,
        "draft_ms": spent["draft_s"] / passes * 1e3,
        "draft_step_ms": spent["draft_s"] / steps * 1e3 if steps else None,
        "verify_ms": spent["verify_s"] / passes * 1e3,
        "round_ms": wall_s / passes * 1e3,
        "loop_us": (wall_s - engine_s) / passes * 1e6,
    }


def _by_method(runs: Sequence[Sample]) -> dict[str, Any]:
    """Rounds by drafting method, for a method that chooses among others."""
    rounds: Counter[str] = Counter()
    for run in runs:
        rounds.update({name: share["rounds"] for name, share in run.stats.get("by_method", {}).items()})
    return {"rounds_by_method": dict(rounds)} if rounds else {}


def _per_position(runs: Sequence[Sample]) -> list[float] | None:
    """Share of all rounds whose token at each position was accepted, over all repetitions."""
    rates = [(run.stats["rounds"], run.stats.get("acceptance_rate_per_position") or []) for run in runs]
    rounds = sum(count for count, _ in rates)
    longest = max(len(of_run) for _, of_run in rates)
    kept = [sum(count * of_run[at] for count, of_run in rates if at < len(of_run)) for at in range(longest)]
    return [count / rounds for count in kept] or None


def _speedup(runs: Sequence[Sample], baseline: Sequence[Sample] | None) -> dict[str, Any]:
    """Speed-ups over plain decoding with an FP16 cache, per repetition, if the memory had one speed."""
    ratios = [
        base.seconds / run.seconds
        for run, base in zip(runs, baseline or [], strict=False)
        if run.steady and base.steady and _same(run.bandwidth, base.bandwidth)
    ]
    return {
        "speedup": statistics.fmean(ratios) if ratios else None,
        "speedup_sd": (statistics.stdev(ratios) if len(ratios) > 1 else 0.0) if ratios else None,
        "speedup_repetitions": len(ratios),
    }


# Writing -------------------------------------------------------------------------------------------------------------


class JsonLines:
    """One object a line, as measured."""

    def __init__(self, sink: output.Sink) -> None:
        self._sink = sink

    def row(self, row: Mapping[str, Any]) -> None:
        """Writes a measurement."""
        self._sink.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Nothing is left."""


class Json:
    """One array, at the end."""

    def __init__(self, sink: output.Sink) -> None:
        self._sink = sink
        self._rows: list[Mapping[str, Any]] = []

    def row(self, row: Mapping[str, Any]) -> None:
        """Keeps a measurement."""
        self._rows.append(row)

    def close(self) -> None:
        """Writes the array."""
        self._sink.write(json.dumps(self._rows, ensure_ascii=False, indent=1) + "\n")


class Csv:
    """A header and one line per measurement; lists are omitted, inapplicable fields are empty."""

    def __init__(self, sink: output.Sink) -> None:
        self._sink = sink
        self._rows: list[Mapping[str, Any]] = []

    def row(self, row: Mapping[str, Any]) -> None:
        """Collects a measurement; the header has the columns of all."""
        self._rows.append({name: value for name, value in row.items() if not isinstance(value, list)})

    def close(self) -> None:
        """Writes the table."""
        text = io.StringIO()
        names = dict.fromkeys(itertools.chain.from_iterable(self._rows))
        writer = csv.DictWriter(text, list(names), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self._rows)
        self._sink.write(text.getvalue())


class Markdown:
    """A table, row by row."""

    HEAD: tuple[tuple[str, int], ...]
    # Number of text columns at the left, which are left-aligned.
    TEXTS: int

    def __init__(self, sink: output.Sink) -> None:
        self._sink = sink
        self._started = False

    def row(self, row: Mapping[str, Any]) -> None:
        """Writes a measurement."""
        if not self._started:
            self._started = True
            self._line([name for name, _ in self.HEAD])
            rules = [
                "-" * width if i < self.TEXTS else "-" * (width - 1) + ":" for i, (_, width) in enumerate(self.HEAD)
            ]
            self._line(rules)
        self._line(self.cells(row))

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        """The columns of a measurement."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is left."""

    def _line(self, cells: Iterable[str]) -> None:
        widths = [width for _, width in self.HEAD]
        padded = (
            cell.ljust(width) if i < self.TEXTS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(map(_cell, cells), widths, strict=True))
        )
        self._sink.write("| " + " | ".join(padded) + " |\n")


def _cell(text: str) -> str:
    """Escapes text so that it stays in its cell, for any model name."""
    return one_line(text).replace("|", "\\|")


class Decoding(Markdown):
    """llama-bench's table, with each row's bandwidth."""

    HEAD = (
        ("model", 20), ("device", 6), ("method", 10), ("kv", 4), ("gamma", 5), ("pages", 5), ("test", 16),
        ("ms/token", 15), ("tokens/s", 8), ("speed-up", 8), ("MB/token", 8), ("GB/s", 5), ("of read", 8),
        ("accepted", 8), ("loop us", 7),
    )  # fmt: skip
    TEXTS = 7

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        """The columns of a measurement."""
        tokens = f"{row['test']}{row['n_prompt'] or row['n_gen']}"
        method = METHODS.get(row["method"], METHODS["ar"])
        loop_us = row.get("loop_us")
        return [
            row["model"] + (" (widened)" if row["widened"] else ""),
            row["device"],
            row["method"],
            row["kv_target"],
            str(row["gamma"]) if method.drafts else "-",
            str(row["draft_pages"]) if method.draft_view else "-",
            tokens + (f" @ d{row['n_depth']}" if row["n_depth"] else "") + (f" x{row['batch']}" * (row["batch"] > 1)),
            f"{row['ms_per_token']:.2f} ± {row['ms_per_token_sd']:.2f}",
            render.number(row["tokens_per_s"]),
            "-" if row.get("speedup") is None else f"{row['speedup']:.2f}x",
            f"{row['bytes_per_token'] / 1e6:.1f}",
            f"{row['gb_per_s']:.1f}",
            "-" if row["bandwidth_share"] is None else f"{row['bandwidth_share']:.1%}",
            render.percent(row["acceptance_rate"]),
            "-" if loop_us is None else f"{loop_us:.0f}",
        ]


class Kernels(Markdown):
    """One kernel per row, with the bytes it must move and the memory bandwidth."""

    HEAD = (
        ("kernel", 15), ("form", 8), ("rows", 5), ("shape", 14), ("us", 9), ("MB", 8), ("GB/s", 6), ("of read", 7),
        ("TFLOP/s", 7),
    )  # fmt: skip
    TEXTS = 4

    def cells(self, row: Mapping[str, Any]) -> list[str]:
        """The columns of a measurement."""
        shape = f"{row['n']} x {row['k']}" if row["n"] else f"d{row['context']}" if row["context"] is not None else ""
        return [
            row["kernel"],
            row["form"],
            str(row["rows"]),
            shape,
            f"{row['us']:.1f}",
            f"{row['bytes'] / 1e6:.2f}",
            f"{row['gb_per_s']:.0f}",
            f"{row['bandwidth_share']:.0%}",
            "-" if row["tflop_per_s"] is None else f"{row['tflop_per_s']:.0f}",
        ]


def writer(form: str, table: type[Markdown], sink: output.Sink) -> Markdown | Csv | Json | JsonLines:
    """The writer for a form of `--output-format`."""
    forms: dict[str, type[Markdown | Csv | Json | JsonLines]] = {"csv": Csv, "json": Json, "jsonl": JsonLines}
    return forms.get(form, table)(sink)
