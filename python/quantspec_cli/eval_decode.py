"""`quantspec eval --decode`: tokens per round of every drafter, by γ, context and pages.

Every method decodes the same sampled text, as in `bench`, in rounds of `GAMMA` drafted tokens. The i-th token of a draft does
not depend on γ. So the share of rounds that accept it estimates this share for every γ ≥ i. It is an estimate because rounds
of another γ begin at other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from . import render, settings
from .bench.answers import Answers
from .errors import DoesNotFitError, IgnoredError, InputError, UsageError, native_errors
from .lists import numbers
from .options import COMBINED, METHODS, no_draft_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from . import _native
    from .model import Model
    from .options import EngineOptions

# Drafted tokens per round.
GAMMA = 8


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to decode.

    Attributes:
        tokens: decoded by every method.
        depths: tokens of text before them.
        pages: numbers of pages that drafts read, besides the method's default.
        draft_model: name of a checkpoint that drafts, for the methods that use one.
        draft_model_kv: the view of its cache; None is the target's.
    """

    tokens: int
    depths: Sequence[int]
    pages: Sequence[int]
    draft_model: str | None
    draft_model_kv: str | None

    @staticmethod
    def of(
        decode: int | None,
        depths: str | None,
        *,
        context: int,
        pages: Sequence[int],
        draft_model: str | None,
        draft_model_kv: str | None,
    ) -> Arguments | None:
        """The arguments of some flags; None without `--decode`. The default depth is that of `--context`."""
        flags = {"depths": depths, "draft_model": draft_model, "draft_model_kv": draft_model_kv}
        for name, given in flags.items():
            if decode is None and given is not None:
                flag = f"--{name.replace('_', '-')}"
                raise IgnoredError(f"{flag} without --decode", f"add --decode N, or leave out {flag}", option=name)
        if decode is None:
            return None
        if decode < 1:
            raise UsageError(f"decode is {decode}", "use 1 or more tokens", option="decode")
        if draft_model is None and draft_model_kv is not None:
            raise no_draft_model(draft_model_kv)
        if draft_model_kv == "fp16" and pages:
            raise UsageError(
                "--draft-model-kv is fp16, and that cache has no scores to choose the best pages by",
                "leave out --draft-pages, or --draft-model-kv",
                option="draft_model_kv",
            )
        found = [max(context, 1)] if depths is None else numbers("--depths", depths)
        if 0 in found:
            raise UsageError(f"depths is {depths}", "use 1 or more tokens: decoding follows a text", option="depths")
        return Arguments(
            tokens=decode, depths=found, pages=pages, draft_model=draft_model, draft_model_kv=draft_model_kv
        )

    @property
    def capacity(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.depths) + self.tokens + 1

    def ways(self) -> Iterator[tuple[str, int | None]]:
        """Every method but `auto`, and numbers of pages in place of the default of those that copy nothing."""
        for name, method in METHODS.items():
            if method.drafts and not method.chooses and (self.draft_model is not None or not method.draft_model):
                yield name, None
                if method.draft_view is not None and name not in COMBINED:
                    yield from ((name, count) for count in self.pages)


def ids_of(model: Model, name: str, text: str, arguments: Arguments) -> list[int]:
    """The text before the deepest answer, and the token that follows it."""
    if arguments.capacity > model.context:
        raise DoesNotFitError(
            f"depth {max(arguments.depths)} and {arguments.tokens} decoded tokens take {arguments.capacity} tokens, "
            f"the context of {model.name} is {model.context}",
            _room(arguments, model.context),
        )
    wanted = max(arguments.depths) + 1
    ids = model.tokenizer.encode_start(text, wanted)
    if len(ids) < wanted:
        raise InputError(
            f"{name} has {len(ids)} tokens; {wanted} were requested", "give a longer text, or lower --depths"
        )
    return ids


def _room(arguments: Arguments, context: int) -> str:
    """A hint: values that fit a context."""
    room = {"--depths": context - arguments.tokens - 1, "--decode": context - max(arguments.depths) - 1}
    ways = [f"{flag} to at most {most}" for flag, most in room.items() if most > 0]
    return f"lower {' or '.join(ways) or '--depths and --decode'}"


def check_fits(model: Model, arguments: Arguments, options: EngineOptions) -> None:
    """Refuses an engine that memory does not hold, before anything is scored."""
    from . import _native

    with native_errors():
        _native.planned(str(model.directory), **_engine_options(model, arguments, options))


def _engine_options(model: Model, arguments: Arguments, options: EngineOptions) -> dict[str, Any]:
    """Size and options of an engine that serves every method."""
    native = options.native()
    names = ("device", "threads", "weights", "kv_target", "kv_rounding", "draft_precision", "accept")
    return {
        "capacity": arguments.capacity,
        "draft_model": model.draft_model(arguments.draft_model),
        "draft_model_kv": arguments.draft_model_kv,
        **{name: native[name] for name in names},
    }


def scores(model: Model, ids: Sequence[int], arguments: Arguments, options: EngineOptions) -> list[dict[str, Any]]:
    """A row for each depth, method and number of pages."""
    from . import _native

    with render.progress("loading weights", shown=True) as on_loading, native_errors():
        engine = _native.Engine(
            str(model.directory),
            every_method=True,
            draft_cache=settings.native_draft_cache(),
            on_loading=on_loading,
            **_engine_options(model, arguments, options),
        )
    rows = []
    ways = list(arguments.ways())
    with render.progress("decoding", shown=True) as tick, native_errors():
        for depth in arguments.depths:
            answers = Answers(engine, model, ids, depth, arguments.tokens, batch=1)
            for method, pages in ways:
                rows.append({"depth": depth, **_score(engine, answers, method, pages)})
                if tick:
                    tick(len(rows), len(arguments.depths) * len(ways))
            answers.close()
    return rows


def _score(engine: _native.Engine, answers: Answers, method: str, pages: int | None) -> dict[str, Any]:
    """Decodes with one method."""
    drafts = METHODS[method]
    engine.configure(
        method=method, gamma=GAMMA, draft_pages=pages or drafts.pages, page_choice=drafts.page_choice or "best"
    )
    answers.run(seed=0)
    stats = engine.stats()
    shares = stats["acceptance_rate_per_position"] or []
    shares += [0.0] * (GAMMA - len(shares))
    return {
        "method": method,
        "draft_pages": pages or drafts.pages or "all",
        "rounds": stats["rounds"],
        "acceptance_rate": stats["acceptance_rate"],
        "acceptance_rate_per_position": shares,
        "tokens_per_round": list(accumulate(shares, initial=1.0))[1:],
    }


def lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The tables for people, one for each depth."""
    report = []
    for depth in dict.fromkeys(row["depth"] for row in rows):
        gammas = "".join(f"{f'γ {gamma}':>6}" for gamma in range(1, GAMMA + 1))
        report += ["", f"tokens per round after {depth:,}", f"{'method':<26} {'accepted':>9} {gammas}"]
        for row in rows:
            if row["depth"] == depth:
                name = row["method"] + ("" if row["draft_pages"] == "all" else f", {row['draft_pages']} pages")
                numbers_of = "".join(f"{tokens:6.2f}" for tokens in row["tokens_per_round"])
                report.append(f"{name:<26} {render.percent(row['acceptance_rate']):>9} {numbers_of}")
    return report
