"""`quantspec eval`: scores the cache views and the drafts on a text, teacher-forced."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import eval_decode, hub, output, prompts, render, report, settings
from .errors import DoesNotFitError, InputError, UsageError, native_errors, one_line
from .model import Model
from .options import AXES, GROUPS, PAGES_MAX, PAGES_MIN, TRUNCATE, whole
from .predict import PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .options import EngineOptions

# A query reads a quantised page from position 2 · 128 on (`core::cache::visible_quantised`); the last token is not fed.
_QUANTISED_FROM = 2 * PAGE_TOKENS + 2

# 1,713 tokens of the demo model: scored in seconds.
SAMPLE = Path(__file__).with_name("sample.txt")


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """How a cache is quantised in place of the engine's own way.

    Attributes:
        k_axis: the elements that share a group of keys: tokens of one "channel", or channels of one "token".
        v_axis: likewise of values.
        group: most elements of a group.
        truncated: drafts read the least of the 8-bit codes that share an upper nibble, not their centre.
    """

    k_axis: str
    v_axis: str
    group: int
    truncated: bool

    @staticmethod
    def of(k_axis: str | None, v_axis: str | None, group: str | None, *, truncated: bool) -> Ablation | None:
        """The ablation of some flags; those not given are the engine's own. None if none is given."""
        if not (k_axis or v_axis or group or truncated):
            return None
        return Ablation(
            k_axis=k_axis or AXES[0], v_axis=v_axis or AXES[1], group=int(group or GROUPS[-1]), truncated=truncated
        )


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of one `quantspec eval`.

    Attributes:
        prompt: text file, "-" for standard input, None for the sample that ships with the package.
        tokens: number of tokens of the text to use, from its start; None is all of it.
        context: of these, tokens processed as a prompt; the next one is only fed, the others are scored.
        sensitivity: also score the default draft with each kind of matrix in 8 bits.
        sensitivity_layers: also with each matrix of each layer alone; implies `sensitivity`.
        draft_pages: a comma list of numbers of pages, at which choices of pages are compared.
        decode: tokens that every method decodes in addition; None for none.
        depths: a comma list of numbers of tokens before them; None is that of `context`.
        draft_model: a checkpoint for the methods that need one.
        draft_model_kv: the view of its cache; None is the target's.
        ablation: a cache with other groups or codes than the engine's own; None is the engine's.
        output: file for the scores instead of standard output; the document of `--json` still goes there.
        report: file for a page of charts.
    """

    model: str | None
    revision: str | None
    offline: bool
    prompt: str | None
    tokens: int | None
    context: int
    sensitivity: bool
    sensitivity_layers: bool
    draft_pages: str | None
    decode: int | None
    depths: str | None
    draft_model: str | None
    draft_model_kv: str | None
    ablation: Ablation | None
    output: str | None
    report: str | None
    as_json: bool


def evaluate(arguments: Arguments, options: EngineOptions) -> output.Done:
    """Prints the scores; the caller prints those of `--json`."""
    _check(arguments)
    budgets = _budgets(arguments.draft_pages)
    decoded = eval_decode.Arguments.of(
        arguments.decode,
        arguments.depths,
        context=arguments.context,
        pages=budgets,
        draft_model=arguments.draft_model,
        draft_model_kv=arguments.draft_model_kv,
    )
    render.warn_of_threads(options.threads)
    stdout = output.Stdout() if arguments.output is None or arguments.as_json else None
    inputs = [arguments.prompt, *hub.files_on_disk(arguments.model, arguments.draft_model)]
    with (
        output.opened(arguments.output, inputs) as file,
        report.opened(arguments.report, inputs, arguments.output) as page,
    ):
        document = prompts.read(str(SAMPLE) if arguments.prompt is None else arguments.prompt)
        render.warn_of_documents([document])
        model = Model.open(
            arguments.model,
            revision=arguments.revision,
            offline=arguments.offline,
            progress=render.on_terminal(),
            draft_model=arguments.draft_model,
        )
        name = "sample.txt" if arguments.prompt is None else document.name
        ids = _tokens(model, document.text, name, arguments)
        text = [] if decoded is None else eval_decode.ids_of(model, name, document.text, decoded)
        if decoded is not None:
            eval_decode.check_fits(model, decoded, options)
        found = {
            "model": model.name,
            "prompt": name,
            "context": arguments.context,
            **_cache(arguments, options),
            **_scores(model, ids, arguments, options, budgets),
        }
        if decoded is not None:
            found["decoded"] = eval_decode.scores(model, text, decoded, options)
        scores = "\n".join(lines(found)) + "\n"
        failure = None if file is None else output.written(file, scores)
        if page is not None:
            failure = output.written(page, report.evaluation(found)) or failure
    # The files are written first, so that an error of standard output cannot lose one.
    if stdout is not None and not arguments.as_json:
        stdout.write(scores)
    if failure is not None:
        failure.kept = found
        raise failure
    return output.Done(document=found if arguments.as_json else None)


def _check(arguments: Arguments) -> None:
    """Raises for numbers of tokens that leave none to score, and for flags that exclude each other."""
    if arguments.tokens is not None and arguments.tokens < 2:
        raise UsageError(
            f"tokens is {arguments.tokens}", "use at least 2: the first token is only context", option="tokens"
        )
    if arguments.context < 0:
        raise UsageError(f"context is {arguments.context}", "use 0 or more tokens", option="context")
    if arguments.tokens is not None and arguments.tokens < arguments.context + 2:
        raise UsageError(
            f"--tokens {arguments.tokens} with --context {arguments.context} leaves no token to score",
            f"the first one after the context is only fed: use --tokens {arguments.context + 2} or more, "
            f"or --context {arguments.tokens - 2} or less",
        )
    if arguments.ablation is not None:
        _refuse_with_ablation(arguments)


def _refuse_with_ablation(arguments: Arguments) -> None:
    """Raises for comparisons that read the engine's own cache."""
    for flag, given in (
        ("--draft-pages", arguments.draft_pages is not None),
        ("--decode", arguments.decode is not None),
        ("--sensitivity", arguments.sensitivity),
        ("--sensitivity-layers", arguments.sensitivity_layers),
    ):
        if given:
            raise UsageError(
                f"{flag} reads the engine's own cache",
                f"leave out {flag}, or --k-axis, --v-axis, --group and --kv-rounding {TRUNCATE}",
                option=flag[2:].replace("-", "_"),
            )


def _tokens(model: Model, text: str, name: str, arguments: Arguments) -> list[int]:
    """The tokens to score: exactly the requested number, at most the model's context."""
    beginning = f"score its beginning with --tokens {model.context}, or less"
    try:
        ids = model.prompt(text, name=name).ids if arguments.tokens is None else []
    except DoesNotFitError as error:
        raise DoesNotFitError(error.message, beginning) from error
    wanted = len(ids) if arguments.tokens is None else arguments.tokens
    # Checked before encoding so many tokens.
    if wanted > model.context:
        raise DoesNotFitError(f"{wanted} tokens of {name} exceed the model's context of {model.context}", beginning)
    if arguments.context + 2 > model.context:
        raise DoesNotFitError(
            f"a prompt of {arguments.context} tokens and two after it exceed the model's context of {model.context}",
            f"use --context {model.context - 2}, or less",
        )
    if arguments.tokens is not None:
        ids = model.tokenizer.encode_start(text, wanted)
    least = max(wanted, arguments.context + 2)
    if len(ids) < least:
        raise InputError(
            f"{name} has {len(ids)} tokens; {least} were requested",
            "give a longer text, or lower --tokens or --context",
        )
    return ids


def _cache(arguments: Arguments, options: EngineOptions) -> dict[str, Any]:
    """How the cache is quantised, as in the document: an ablation, or the rounding of the engine's own."""
    if arguments.ablation is None:
        return {"kv_rounding": options.kv_rounding}
    found = dataclasses.asdict(arguments.ablation)
    rounding = TRUNCATE if found.pop("truncated") else options.kv_rounding
    return {"ablation": {**found, "kv_rounding": rounding}}


def _budgets(given: str | None) -> list[int]:
    """The numbers of pages of a comma list, each once."""
    if given is None:
        return []
    from .lists import numbers

    found = numbers("--draft-pages", given)
    for count in found:
        whole("draft_pages", count, PAGES_MIN, PAGES_MAX)
    return found


@contextmanager
def _scoring() -> Iterator[None]:
    """Converts errors of the native module. If memory is short, the remedy is a shorter text."""
    try:
        with native_errors():
            yield
    except DoesNotFitError as error:
        raise DoesNotFitError(
            error.message,
            "every view keeps the whole text: score fewer tokens with --tokens, or use a smaller model or more memory",
        ) from error


def _scores(
    model: Model, ids: Sequence[int], arguments: Arguments, options: EngineOptions, budgets: Sequence[int]
) -> dict[str, Any]:
    from . import _native

    common: dict[str, Any] = {
        "context": arguments.context,
        "device": options.device,
        "threads": options.threads,
        "weights": options.weights,
        "kv_rounding": options.kv_rounding,
    }
    directory = str(model.directory)
    # Scored first, because it may refuse the weights.
    sensitivity = {}
    if arguments.sensitivity or arguments.sensitivity_layers:
        with render.progress("scoring matrices in 8 bits", shown=True) as on_progress, _scoring():
            scores = _native.sensitivity(
                directory, ids, layers=arguments.sensitivity_layers, on_progress=on_progress, **common
            )
            sensitivity = {"sensitivity": scores}
    with render.phases("loading weights", "scoring", shown=True) as (on_loading, on_progress), _scoring():
        found = _native.evaluate(
            directory,
            ids,
            draft_precision=options.draft_precision,
            pages=budgets,
            ablated=None if arguments.ablation is None else dataclasses.astuple(arguments.ablation),
            draft_cache=settings.native_draft_cache(),
            on_loading=on_loading,
            on_progress=on_progress,
            **common,
        )
    render.note_of_drafts(found)
    if len(ids) < _QUANTISED_FROM and not arguments.as_json:
        render.note(
            f"the cache of {len(ids)} tokens has no quantised page, so that all its views are equal: score "
            f"{_QUANTISED_FROM} tokens or more"
        )
    return {name: value for name, value in found.items() if name not in {"cached_drafts", "note"}} | sensitivity


def lines(found: dict[str, Any]) -> list[str]:
    """The scores for people."""
    positions = f"{found['positions']:,} position{'s' * (found['positions'] != 1)}"
    report = [
        f"{one_line(found['model'])} on {one_line(found['prompt'])}: {positions}, teacher-forced",
        *([f"cache: {cache}"] if (cache := render.rounding(found)) else ()),
        "",
        f"{'target':<10} {'nll':>9} {'perplexity':>11} {'KLD to fp16':>12} {'top-1':>8}",
    ]
    for name, score in found["targets"].items():
        divergence = f"{score['kld']:12.2e} {score['top1']:8.2%}" if "kld" in score else f"{'-':>12} {'-':>8}"
        report.append(f"{name:<10} {score['nll']:9.5f} {score['perplexity']:11.4f} {divergence}")
    for name, score in found.get("weights", {}).items():
        report += ["", f"{'weights':<10} {'KLD to the checkpoint':>24} {'top-1':>8}"]
        report.append(f"{name:<10} {score['kld']:24.2e} {score['top1']:8.2%}")
    report += ["", f"{'draft':<10} {'acceptance':>10} {'top-1':>8}"]
    report += [
        f"{name:<10} {score['acceptance']:10.2%} {score['top1']:8.2%}" for name, score in found["drafts"].items()
    ]
    if "sensitivity" in found:
        report += ["", f"{'in 8 bits':<10} {'acceptance':>10} {'top-1':>8} {'draft bytes':>12} {'value':>7}"]
    for name, score in found.get("sensitivity", {}).items():
        value = "-" if score["value"] is None else f"{score['value']:.3f}"
        added = f"+{score['added_share']:.1%}"
        report.append(f"{name:<10} {score['acceptance']:10.2%} {score['top1']:8.2%} {added:>12} {value:>7}")
    report += _by_layer(found.get("sensitivity", {}))
    for pages, choices in found.get("page_choices", {}).items():
        report += ["", f"{f'{pages} pages':<10} {'acceptance':>10} {'top-1':>8}"]
        report += [f"{name:<10} {score['acceptance']:10.2%} {score['top1']:8.2%}" for name, score in choices.items()]
    return report + eval_decode.lines(found.get("decoded", ()))


def _by_layer(sensitivity: dict[str, Any]) -> list[str]:
    """Acceptance by the layer and kind of the one matrix in the target's precision; nothing without such scores."""
    kinds = {name: score["layers"] for name, score in sensitivity.items() if "layers" in score}
    if not kinds:
        return []
    rows = zip(*kinds.values(), strict=True)
    return [
        "",
        f"{'exact':<10}" + "".join(f"{name:>10}" for name in kinds),
        *(f"layer {layer:<4}" + "".join(f"{rate:10.2%}" for rate in row) for layer, row in enumerate(rows)),
    ]
