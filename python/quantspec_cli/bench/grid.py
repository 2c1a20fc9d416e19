"""What one `quantspec bench` measures: its arguments, the lists in it, and the text to read."""

from __future__ import annotations

import gzip
import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import files, prompts, render
from ..errors import DoesNotFitError, IgnoredError, InputError, ModelError, UsageError, native_errors
from ..lists import items, numbers, numbers_or
from ..options import (
    BATCH_MAX,
    GAMMA_MAX,
    KV_ROUNDINGS,
    KV_TARGETS,
    METHODS,
    PAGE_CHOICES,
    PAGES_MAX,
    PAGES_MIN,
    SEED_MAX,
    check_scores,
    no_draft_model,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..model import Model
    from ..options import EngineOptions, Method

# The novel whose beginning is the sample of `eval` and `selftest`: 230,000 tokens, enough for every depth.
BOOK = Path(__file__).parent.with_name("book.txt.gz")
# More than a mean needs.
REPETITIONS_MAX = 10_000
WARM_UP_MAX = 1_000_000

Gamma = int | Literal["auto"]
Pages = int | Literal["all", "auto"]


@dataclass(frozen=True)
class Variant:
    """A decoding method with its settings: what a row of decoding measures.

    Attributes:
        name: of the method.
        kv_target: the target's view of the cache.
        gamma: drafted tokens per round; 0 for "ar".
        draft_pages: pages a draft reads per KV head.
    """

    name: str
    kv_target: str
    gamma: Gamma = 0
    draft_pages: Pages = "all"

    @property
    def method(self) -> Method:
        """What the method reads."""
        return METHODS[self.name]

    def native(self) -> dict[str, Any]:
        """Keyword arguments of `_native.Engine.configure`."""
        return {
            "method": self.name,
            "kv_target": self.kv_target,
            "gamma": None if self.gamma == "auto" else self.gamma,
            "draft_pages": None if self.draft_pages == "all" else self.draft_pages,
        }


BASELINE = Variant("ar", "fp16")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of one `quantspec bench`; lists as typed."""

    model: str | None
    revision: str | None
    offline: bool
    prompt: str | None
    n_prompt: str
    n_gen: str
    n_depth: str
    batch: str
    ragged: bool
    gamma: str
    draft_pages: str
    page_choice: str | None
    draft_model: str | None
    draft_model_kv: str | None
    draft_refresh: int
    methods: str
    repetitions: int
    warm_up: int
    seed: int
    output_format: str
    output: str | None
    report: str | None
    as_json: bool


@dataclass(frozen=True)
class Grid:
    """Arguments with their lists read."""

    n_prompt: list[int]
    n_gen: list[int]
    n_depth: list[int]
    batches: list[int]
    variants: list[Variant]

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


def read_grid(arguments: Arguments, options: EngineOptions) -> Grid:
    """The lists of the arguments, or an error about the wrong item."""
    whole("repetitions", arguments.repetitions, 1, REPETITIONS_MAX)
    whole("warm_up", arguments.warm_up, 0, WARM_UP_MAX)
    # Every repetition has the next seed; its untimed tokens have the one after it.
    if not 0 <= arguments.seed <= SEED_MAX - arguments.repetitions:
        most = SEED_MAX - arguments.repetitions
        raise UsageError(f"seed is {arguments.seed}", f"use a whole number, 0 to {most}", option="seed")
    grid = Grid(
        n_prompt=[n for n in numbers("-p", arguments.n_prompt) if n > 0],
        n_gen=[n for n in numbers("-n", arguments.n_gen) if n > 0],
        n_depth=numbers("-d", arguments.n_depth),
        batches=_batches(arguments.batch),
        variants=variants(
            arguments.methods,
            numbers_or("--gamma", arguments.gamma, ("auto",), 0, GAMMA_MAX),
            numbers_or("--draft-pages", arguments.draft_pages, ("all", "auto"), PAGES_MIN, PAGES_MAX),
        ),
    )
    drafting = [variant.name for variant in grid.variants if variant.method.draft_model]
    chooses = any(variant.method.chooses for variant in grid.variants)
    hint = "give both --draft-model and --methods ...,draft-model or auto, or neither"
    if drafting and arguments.draft_model is None:
        raise UsageError(f"--methods has {drafting[0]}, but there is no draft model", hint, option="draft_model")
    if arguments.draft_model is not None and not drafting and not chooses:
        unused = f"--draft-model is {arguments.draft_model}, but no method of --methods uses it"
        raise IgnoredError(unused, hint, option="draft_model")
    if arguments.draft_model is None and arguments.draft_model_kv is not None:
        raise no_draft_model(arguments.draft_model_kv)
    if arguments.ragged and not (grid.n_gen and max(grid.batches) > 1):
        raise IgnoredError("--ragged without several sequences", "add --batch N, or leave it out", option="ragged")
    whole("draft_refresh", arguments.draft_refresh, 0, PAGES_MAX, " (0 is never)")
    _refuse_unread(arguments, options, grid)
    _check_pages(arguments, grid)
    if not grid.n_prompt and not grid.n_gen:
        raise UsageError("nothing to measure: -p and -n are 0", "give -p N for prefill, -n N for decoding, or both")
    return grid


def tests(grid: Grid, *, ragged: bool) -> Iterator[dict[str, Any]]:
    """The tests of a grid, in the order of measuring, as the fields of a row that name one."""
    for depth in grid.n_depth:
        for n in grid.n_prompt:
            yield {"batch": 1, "test": "pp", "n_prompt": n, "n_gen": 0, "n_depth": depth}
        for n, batch in itertools.product(grid.n_gen, grid.batches):
            test = {"batch": batch, "test": "tg", "n_prompt": 0, "n_gen": n, "n_depth": depth}
            yield test | ({"ragged": True} if ragged and batch > 1 else {})


def page_choice(arguments: Arguments, method: Method) -> str:
    """How a draft of this method chooses pages, if it does not read all."""
    return method.page_choice or arguments.page_choice or PAGE_CHOICES[0]


def quantises_cache(variants: Iterable[Variant], draft_model_kv: str | None) -> bool:
    """Whether the target, a draft or the draft model reads a quantised cache."""
    views = {view for variant in variants for view in (variant.kv_target, variant.method.draft_view)}
    return not views | {draft_model_kv} <= {None, "target", "fp16"}


def _refuse_unread(arguments: Arguments, options: EngineOptions, grid: Grid) -> None:
    """Refuses settings that no method reads."""
    methods = [variant.method for variant in grid.variants]
    quantised = quantises_cache(grid.variants, arguments.draft_model_kv)
    # Setting, its value, values without effect, whether a method reads it, what such a method does, one of them.
    for option, value, harmless, read, does, example in (
        ("gamma", arguments.gamma, {"auto", "0"}, any(m.drafts for m in methods), "drafts", "quantspec"),
        (
            "draft_pages",
            arguments.draft_pages,
            {"all"},
            any(m.draft_view for m in methods),
            "drafts by pages",
            "quantspec",
        ),
        (
            "draft_precision",
            options.draft_precision,
            {"auto", "none"},
            any(m.draft_weights for m in methods),
            "reads draft weights",
            "quantspec",
        ),
        (
            "draft_refresh",
            str(arguments.draft_refresh),
            {"0"},
            any(m.page_choice == "snap" for m in methods),
            "keeps a choice of pages",
            "snapkv",
        ),
        ("kv_rounding", options.kv_rounding, {KV_ROUNDINGS[0]}, quantised, "quantises a cache", "ar-int8"),
    ):
        if not read and not set(items(option, value)) <= harmless:
            raise IgnoredError(
                f"--{option.replace('_', '-')} is {value}, but no method of --methods {does}",
                f"add {example} to --methods, or leave it out",
                option=option,
            )


def _check_pages(arguments: Arguments, grid: Grid) -> None:
    """Refuses a choice of pages that no method makes, or without the scores that it needs."""
    chosen = [variant for variant in grid.variants if variant.draft_pages != "all"]
    if arguments.page_choice == "window" and not any(variant.method.page_choice is None for variant in chosen):
        raise IgnoredError(
            "page_choice is 'window', but no method of --methods chooses pages",
            "add --draft-pages N, or leave it out",
            option="page_choice",
        )
    for variant in chosen:
        choice = page_choice(arguments, variant.method)
        check_scores(variant.name, variant.draft_pages, choice, variant.kv_target, arguments.draft_model_kv)


def _batches(given: str) -> list[int]:
    found = numbers("--batch", given)
    if not all(1 <= batch <= BATCH_MAX for batch in found):
        raise UsageError(f"--batch is {given}", f"use whole numbers, 1 to {BATCH_MAX}", option="--batch")
    return found


def variants(given: str, gammas: Sequence[Gamma], pages: Sequence[Pages]) -> list[Variant]:
    """The methods of a list of `METHOD` or `METHOD-KV`, combined with every γ and page count if they draft."""
    found: dict[Variant, None] = {}
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
        found.update((Variant(name, target, gamma, count), None) for gamma in of_gamma for count in of_pages)
    return list(found)


def models_of(given: str | None) -> list[str | None]:
    """The models of a comma list, each once; a directory may have a comma in its name."""
    if given is None or files.status(given) is not None:
        return [given]
    return [*dict.fromkeys(items("--model", given))]


def read_text(arguments: Arguments) -> tuple[str, str]:
    """Name and text of the document to read."""
    if arguments.prompt is None:
        return "the shipped book", gzip.decompress(BOOK.read_bytes()).decode()
    document = prompts.read(arguments.prompt)
    render.warn_of_documents([document])
    return document.name, document.text


def tokens_of(model: Model, name: str, text: str, grid: Grid) -> list[int]:
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


def check_fits(model: Model, grid: Grid, arguments: Arguments, options: EngineOptions) -> None:
    """Refuses a model or sizes that the device or its memory refuses, before anything is read."""
    from .. import _native

    try:
        draft_model = model.draft_model(arguments.draft_model)
        with native_errors():
            _native.planned(
                str(model.directory), draft_model=draft_model, **engine_options(grid, options, arguments.draft_model_kv)
            )
    except (DoesNotFitError, ModelError) as error:
        raise type(error)(f"{model.name}: {error.message}", error.hint) from error


def engine_options(grid: Grid, options: EngineOptions, draft_model_kv: str | None = None) -> dict[str, Any]:
    """Sizes and options of an engine that serves every method of the grid."""
    native = options.native()
    full = any(variant.kv_target == "fp16" for variant in grid.variants)
    sizes = {"capacity": grid.capacity, "slots": max(grid.batches) if grid.n_gen else 1}
    return (
        sizes
        | {"kv_target": "fp16" if full else "int8", "draft_model_kv": draft_model_kv}
        | {
            name: native[name]
            for name in ("device", "threads", "weights", "kv_rounding", "draft_precision", "page_choice", "accept")
        }
    )
