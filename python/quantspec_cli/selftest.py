"""`quantspec selftest`: verifies on this machine that speculation changes no token.

Plain decoding of each prompt alone is the reference. Every drafting method, with every γ, greedy and sampled, alone and
in a batch, must yield the same ids. Prompts end just before, at and after page borders, where errors are most likely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import loop, render
from .engine import Engine
from .errors import EXIT_DONE, EXIT_ERROR, DoesNotFitError, native_errors, one_line
from .model import Model
from .options import COMBINED, GAMMA_MAX, METHODS, PAGE_CHOICES, PAGES_MIN, GenerateOptions
from .output import Done, Stdout
from .text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .options import EngineOptions

GAMMAS = (1, 2, 4, 7, 12, GAMMA_MAX)
# γ values for settings where all values would be redundant: one mostly accepted, one mostly rejected.
FEW = (4, GAMMA_MAX)
# Around one and two pages of 128 tokens; from 5 pages on, a selection omits some.
LENGTHS = (127, 128, 129, 255, 256, 257, 640, 700)
LONG = 640
# Enough for the shortest prompt to pass position 256, where a page first becomes visible.
NEW_TOKENS = 136
BATCH = 4

_SAMPLING = {
    "greedy": GenerateOptions(max_new_tokens=NEW_TOKENS),
    # With penalties, which depend on drafted tokens.
    "replay": GenerateOptions(
        max_new_tokens=NEW_TOKENS,
        temperature=0.8,
        top_p=0.95,
        seed=20_250_210,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        no_repeat_ngram=8,
    ),
}


@dataclass(frozen=True)
class Case:
    """One comparison: a batch of prompts decoded in one way.

    Attributes:
        page_choice: how the pages of a draft are chosen; None if it reads all.
        difference: the first difference from plain decoding, in words; None if there is none.
    """

    method: str
    draft_pages: int | str
    page_choice: str | None
    threads: int | None
    gamma: int | str
    accept: str
    batch: int
    tokens: int
    difference: str | None

    def to_json(self) -> dict[str, Any]:
        """The case as `--json` prints it."""
        return {
            "method": self.method,
            "draft_pages": self.draft_pages,
            "threads": self.threads,
            "gamma": self.gamma,
            "accept": self.accept,
            "batch": self.batch,
            "tokens": self.tokens,
            "equal": self.difference is None,
        }


def selftest(
    *,
    model: str | None,
    revision: str | None,
    offline: bool,
    draft_model: str | None,
    options: EngineOptions,
    as_json: bool,
) -> Done:
    """Runs all cases up to the first difference and prints the comparison; the caller prints `--json`'s report."""
    out = Stdout()
    render.warn_of_threads(options.threads)
    opened = Model.open(
        model, revision=revision, offline=offline, progress=render.on_terminal(), draft_model=draft_model
    )
    prompts = cut_prompts(opened)
    with _engine(opened, replace(options, method="ar", gamma=0), prompts, batch=1) as engine:
        device = engine.info["device"]
        ways = list(_ways(replace(options, weights=engine.info["weights"]), draft_model, prompts))
        total = sum(way.runs * len(_SAMPLING) for way in ways)
        if not as_json:
            lengths = ", ".join(str(len(prompt)) for prompt in prompts)
            prompts_of = f"prompts of {lengths} tokens, {NEW_TOKENS} new tokens each"
            out.write(f"{one_line(opened.name)} on {device}: {total} comparisons, {prompts_of}\n")
        references = _references(engine, prompts)
    cases: list[Case] = []
    for case in _cases(opened, ways, prompts, references):
        cases.append(case)
        if not as_json:
            out.write(f"{len(cases):3}/{total} {_line(case)}\n")
        if case.difference is not None:
            break
    compared = sum(case.tokens for case in cases)
    difference = cases[-1].difference
    code = EXIT_DONE if difference is None else EXIT_ERROR
    if as_json:
        report = {
            "model": opened.name,
            "device": device,
            "passed": difference is None,
            "compared_tokens": compared,
            "first_difference": difference,
            "cases": [case.to_json() for case in cases],
        }
        return Done(code, report)
    passed = f"passed: {compared:,} tokens are those of plain decoding"
    out.write((passed if difference is None else f"failed: {difference}") + "\n")
    return Done(code)


def cut_prompts(model: Model) -> list[list[int]]:
    """Prompts of `LENGTHS` tokens that fit the model's context, from different parts of the sample text."""
    text = Path(__file__).with_name("sample.txt").read_text(encoding="utf-8")
    ids = model.tokenizer.encode(text)
    while len(ids) < LENGTHS[-1] + len(LENGTHS):
        ids += model.tokenizer.encode(text, special=False)
    lengths = [length for length in LENGTHS if length + NEW_TOKENS <= model.context]
    if len(lengths) < BATCH:
        raise DoesNotFitError(
            f"the model's context of {model.context} tokens is too short for the self-test",
            f"choose a model with a context of at least {LENGTHS[BATCH - 1] + NEW_TOKENS} tokens",
        )
    # All prompts share the first token (often a BOS) and differ after it.
    return [ids[:1] + ids[1 + place : length + place] for place, length in enumerate(lengths)]


def _references(engine: Engine, prompts: Sequence[list[int]]) -> dict[str, list[list[int]]]:
    """Plain decoding of every prompt alone, per acceptance rule."""
    return {
        accept: [_decode(engine, [prompt], sampling, 0)[0] for prompt in prompts]
        for accept, sampling in _SAMPLING.items()
    }


@dataclass(frozen=True)
class Way:
    """A way to decode prompts, with an engine of its own.

    Attributes:
        places: of the prompts.
        alone: γ of the runs of one sequence.
        batched: γ of the runs of a batch.
    """

    options: EngineOptions
    places: Sequence[int]
    alone: Sequence[int | str]
    batched: Sequence[int | str]

    @property
    def runs(self) -> int:
        """Number of runs per acceptance rule."""
        return len(self.alone) + len(self.batched)


def _ways(options: EngineOptions, draft_model: str | None, prompts: Sequence[list[int]]) -> Iterator[Way]:
    everything = range(len(prompts))
    fixed = replace(options, gamma=GAMMA_MAX)
    for name, method in METHODS.items():
        if not method.drafts or (method.draft_model and draft_model is None):
            continue
        drafting = replace(
            fixed,
            method=name,
            draft_pages=PAGES_MIN if method.pages else None,
            draft_model=draft_model if method.draft_model or method.chooses else None,
        )
        yield Way(drafting, everything, FEW, FEW if name in COMBINED or method.chooses else GAMMAS)
    quantspec = replace(fixed, method="quantspec")
    if long := [place for place in everything if len(prompts[place]) >= LONG]:
        for choice in PAGE_CHOICES:
            yield Way(replace(quantspec, draft_pages=PAGES_MIN, page_choice=choice), long, FEW, FEW)
    yield Way(replace(quantspec, threads=1), everything, FEW[:1], FEW[:1])
    # Drafts of one sequence that end early.
    for way in (quantspec, replace(fixed, method="auto", draft_model=draft_model)):
        yield Way(replace(way, gamma="auto"), everything, ("auto", "auto"), ())


def _cases(
    model: Model, ways: Iterable[Way], prompts: Sequence[list[int]], references: dict[str, list[list[int]]]
) -> Iterator[Case]:
    for way in ways:
        # Closed before the next one is loaded: two may not fit.
        with _engine(model, way.options, prompts, batch=BATCH) as engine:
            for accept, sampling in _SAMPLING.items():
                runs = [(1, *run) for run in enumerate(way.alone)] + [(BATCH, *run) for run in enumerate(way.batched)]
                for batch, turn, gamma in runs:
                    # The batch advances by one prompt per case, so its neighbours have other lengths.
                    chosen = [way.places[turn % len(way.places)]]
                    chosen += [(chosen[0] + step) % len(prompts) for step in range(1, batch)]
                    decoded = _decode(engine, [prompts[place] for place in chosen], sampling, gamma)
                    expected = [references[accept][place] for place in chosen]
                    pages = way.options.pages_of_draft
                    case = Case(
                        method=way.options.method,
                        draft_pages=pages,
                        page_choice=None if pages == "all" else way.options.choice_of_pages,
                        threads=way.options.threads,
                        gamma=gamma,
                        accept=accept,
                        batch=batch,
                        tokens=sum(map(len, decoded)),
                        difference=None,
                    )
                    found = first_difference([len(prompts[place]) for place in chosen], expected, decoded)
                    yield case if found is None else replace(case, difference=f"{_line(case)}: {found}")


def first_difference(lengths: Sequence[int], expected: Sequence[list[int]], decoded: Sequence[list[int]]) -> str | None:
    """Where two lists of answers differ first, in words."""
    for length, right, wrong in zip(lengths, expected, decoded, strict=True):
        if right != wrong:
            at = next(
                (at for at, pair in enumerate(zip(right, wrong, strict=False)) if pair[0] != pair[1]),
                min(len(right), len(wrong)),
            )
            expects, got = right[at : at + 1], wrong[at : at + 1]
            return f"prompt of {length} tokens, new token {at}: {expects} expected, {got} decoded"
    return None


def _engine(model: Model, options: EngineOptions, prompts: Sequence[list[int]], *, batch: int) -> Engine:
    longest = max(map(len, prompts))
    return Engine(model, options, context=longest + NEW_TOKENS, longest_prompt=longest, batch=batch)


def _decode(
    engine: Engine, prompts: Sequence[list[int]], options: GenerateOptions, gamma: int | str
) -> list[list[int]]:
    """Decodes prompts together with a fixed γ or the engine's, through the scheduler-free loop; ids only, no end-of-text
    token."""
    native = engine.native
    with native_errors():
        slots = [native.add(prompt, **options.sampling()) for prompt in prompts]
        texts = {slot: Text(lambda _: b"", limit=options.max_new_tokens) for slot in slots}

        def fixed(slot: int) -> int:
            return min(int(gamma), options.max_new_tokens - len(texts[slot].tokens) - 1)

        for _ in loop.decode(native, texts, choose_gamma=None if gamma == "auto" else fixed):
            pass
    return [texts[slot].tokens for slot in slots]


def _line(case: Case) -> str:
    choice = "" if case.page_choice is None else f" ({case.page_choice})"
    pages = f"{case.draft_pages} pages{choice}"
    threads = "" if case.threads is None else f", {case.threads} thread" + ("s" if case.threads > 1 else "")
    return (
        f"{case.method:15} {pages}, gamma {case.gamma!s:>2}, {case.accept}, batch {case.batch}{threads}: "
        f"{case.tokens} tokens " + ("equal" if case.difference is None else "differ")
    )
