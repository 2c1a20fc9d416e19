"""`quantspec plan`: whether a model fits on this machine, with which context and batch, and how fast.

For a model on the hub only its configuration is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import hub, predict, render, sizes
from .errors import DoesNotFitError, FileError, UsageError, native_errors, one_line
from .options import BATCH_MAX, METHODS, EngineOptions, whole
from .output import Done, Stdout

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of one `quantspec plan`.

    Attributes:
        ctx_size: tokens of each sequence, prompt and answer together; 0 is the model's context.
        batch: sequences that decode together.
        acceptance: probability that a drafted token is accepted; None for those of `predict.ACCEPTANCE`.
    """

    model: str | None
    revision: str | None
    offline: bool
    ctx_size: int
    batch: int
    acceptance: float | None
    as_json: bool


def plan(arguments: Arguments, options: EngineOptions) -> Done:
    """Prints the plan; the caller prints that of `--json`. A plan that does not fit is then raised as an error."""
    whole("batch", arguments.batch, 1, BATCH_MAX)
    whole("ctx_size", arguments.ctx_size, 0, 2**32)
    if arguments.acceptance is not None and not 0 <= arguments.acceptance <= 1:
        raise UsageError(f"acceptance is {arguments.acceptance}", "use a share, 0 to 1", option="acceptance")
    render.warn_of_threads(options.threads)
    stdout = Stdout()
    found = examine(arguments, options)
    if not arguments.as_json:
        stdout.write("\n".join(lines(found)) + "\n")
    if not found["fits"]:
        raise _refusal(found)
    return Done(document=found if arguments.as_json else None)


def examine(arguments: Arguments, options: EngineOptions) -> dict[str, Any]:
    """The document of `--json`."""
    from . import _native

    def described(model: str | None, revision: str | None) -> str:
        return str(hub.describe(model, revision=revision, offline=arguments.offline, progress=render.on_terminal()))

    path = described(arguments.model, arguments.revision)
    draft_model = None if options.draft_model is None else described(options.draft_model, None)
    with native_errors():
        info = _native.model_info(path, described=True)
        drafts_info = info if draft_model is None else _native.model_info(draft_model, described=True)
        longest = min(int(info["max_positions"]), int(drafts_info["max_positions"]))
        context = arguments.ctx_size or longest
        common: dict[str, Any] = {"capacity": context, "slots": arguments.batch, "described": True}
        memory = _native.plan(path, draft_model=draft_model, **common, **options.native())
        alone = memory
        if draft_model is not None:
            # The model's own draft weights, which the engine with a draft model does not hold.
            native = EngineOptions(device=options.device, threads=options.threads, kv_target=options.kv_target).native()
            alone = _native.plan(path, **common, **native | {"weights": memory["weights"]})
        traffic = _native.traffic(
            path,
            context - 1,
            1,
            memory["weights"],
            memory["device"],
            draft_precision=alone["draft_precision"],
            described=True,
        )
    found = _memory(arguments, options, info, memory, traffic, context=context, longest=longest)
    if draft_model is not None:
        found |= {
            "draft_model": options.draft_model,
            "draft_model_kv": options.view_of_draft_model,
            "draft_model_context": drafts_info["max_positions"],
        }
    if memory["fits"]:
        drafted = traffic["draft_weights_bytes"] or alone["draft_weights_bytes"]
        load = predict.Load.of(info, traffic, drafted, context, weights=memory["weights"], kv_target=options.kv_target)
        rates = _rates(path, options, alone, load)
        step_s = None
        if draft_model is not None:
            step_s = _step_of_draft_model(draft_model, drafts_info, options, alone, context, batch=arguments.batch)
        found |= predictions(rates, load, batch=arguments.batch, acceptance=arguments.acceptance, step_s=step_s)
    return found


def _memory(
    arguments: Arguments,
    options: EngineOptions,
    info: Mapping[str, Any],
    memory: Mapping[str, Any],
    traffic: Mapping[str, Any],
    *,
    context: int,
    longest: int,
) -> dict[str, Any]:
    """The fields of the document without speeds; `longest` is the models' context."""
    # Drafts read the upper nibbles, also next to a target in FP16.
    page = predict.page_bytes(traffic)
    kept = page["int4"] + page["fp16"] if options.kv_target == "fp16" else page[options.kv_target]
    return {
        "model": arguments.model or hub.DEMO,
        "device": memory["device"],
        "fits": memory["fits"],
        "kv_target": options.kv_target,
        "weights": memory["weights"],
        "weights_bytes": memory["weights_bytes"],
        "draft_weights_bytes": memory["draft_weights_bytes"],
        "draft_precision": memory["draft_precision"],
        "cache_bytes_per_token": kept / predict.PAGE_TOKENS,
        "planned_bytes": memory["planned_bytes"],
        "available_bytes": memory["available_bytes"],
        "context": context,
        "longest_context": memory["longest_context"],
        "model_context": info["max_positions"],
        "batch": arguments.batch,
        "largest_batch": min(memory["largest_batch"], BATCH_MAX) if context <= longest else 0,
        "device_name": None,
        "bandwidth_gb_per_s": None,
        "predicted": None,
        "methods": [],
        "roofline": [],
        "sizes": _sizes(options.device),
    }


def _sizes(device: str) -> list[dict[str, Any]]:
    """Model sizes that fit the device; empty without a temporary folder, which the plan itself does not need."""
    try:
        return sizes.table(device)
    except FileError as error:
        render.note(f"warning: no table of what fits here: {error.message}; {error.hint}")
        return []


def _rates(path: str, options: EngineOptions, memory: Mapping[str, Any], load: predict.Load) -> dict[str, Any]:
    """The machine's speed at the shapes of a model."""
    from . import _native

    # On a CPU, passes of a large model take half a minute. A line that is redrawn would disturb them.
    if render.on_terminal():
        render.note("timing passes of this shape on this machine")
    with native_errors():
        return _native.rates(
            path,
            device=options.device,
            threads=options.threads,
            context=load.context,
            weights=memory["weights"],
            kv_target=load.kv_target,
            draft_precision=memory["draft_precision"],
            drafts=predict.drafts(load.pages),
        )


def _step_of_draft_model(
    path: str, info: Mapping[str, Any], options: EngineOptions, memory: Mapping[str, Any], context: int, *, batch: int
) -> float:
    """Seconds of a draft model's step: a pass of that model as a target over its own cache."""
    from . import _native

    with native_errors():
        traffic = _native.traffic(path, context - 1, 1, memory["weights"], memory["device"], described=True)
    load = predict.Load.of(
        info,
        traffic,
        traffic["draft_weights_bytes"] or 0,
        context,
        weights=memory["weights"],
        kv_target=options.view_of_draft_model,
    )
    machine = predict.Machine.of(_rates(path, options, memory, load), load)
    return predict.seconds(machine, load, predict.TARGET, rows=1, batch=batch)


def predictions(
    rates: Mapping[str, Any],
    load: predict.Load,
    *,
    batch: int,
    acceptance: float | None,
    step_s: float | None = None,
) -> dict[str, Any]:
    """Predictions from the machine's rates. `step_s` are the seconds of a draft model's step."""
    machine = predict.Machine.of(rates, load)
    rounds = {draft: predict.Rounds.of(machine, load, draft, batch=batch) for draft in predict.drafts(load.pages)}
    speeds = {draft: of.speed(draft.acceptance if acceptance is None else acceptance) for draft, of in rounds.items()}
    copies = predict.Rounds.of(machine, load, None, batch=batch)
    # Their acceptance depends on the text, and on the other model.
    others = {"ngram": copies}
    if step_s is not None:
        others["draft-model"] = predict.Rounds.of(machine, load, None, batch=batch, step_s=step_s)
    plain = copies.plain

    best, chosen = (
        max(among, key=lambda draft: speeds[draft].tokens_per_s)
        for among in (speeds, [draft for draft in speeds if draft.method in predict.CHOICES])
    )
    gamma = speeds[best].gamma
    prompt = predict.prompt(machine, load)
    prefill = load.context / sum(operation.seconds for operation in prompt) if prompt else None
    roofline = [
        *predict.step(machine, load, predict.TARGET, rows=1, batch=batch, name="decode"),
        *predict.step(machine, load, best, rows=1, batch=batch, name="draft"),
        *predict.step(machine, load, predict.TARGET, rows=gamma + 1, batch=batch, name="verify"),
        *prompt,
    ]
    return {
        "device_name": rates["device_name"],
        "bandwidth_gb_per_s": rates["read_gb_per_s"],
        "predicted": {
            "method": best.method,
            "gamma": gamma,
            "draft_pages": best.pages or METHODS[best.method].pages or "all",
            "acceptance": speeds[best].acceptance,
            "prefill_tokens_per_s": prefill,
            "ar_tokens_per_s": plain,
            "decode_tokens_per_s": speeds[best].tokens_per_s,
        },
        "methods": [
            _row("ar", copies, predict.Speed(0, None, plain)),
            _row("auto", rounds[chosen], speeds[chosen]),
            *(_row(draft.method, rounds[draft], speed) for draft, speed in speeds.items()),
            *(_row(name, of, None if acceptance is None else of.speed(acceptance)) for name, of in others.items()),
        ],
        "roofline": [operation.to_json() for operation in roofline],
    }


def _row(method: str, of: predict.Rounds, speed: predict.Speed | None) -> dict[str, Any]:
    """The prediction of one method; without a speed if its acceptance is unknown."""
    return {
        "method": method,
        "draft_pages": (of.draft and of.draft.pages) or METHODS[method].pages or "all",
        "gamma": speed and speed.gamma,
        "acceptance": speed and speed.acceptance,
        "pays_from": None if method == "ar" else of.pays_from,
        "decode_tokens_per_s": speed and speed.tokens_per_s,
        "speedup": speed and speed.tokens_per_s / of.plain,
        "round_ms": [1e3 * time for time in (of.seconds[:1] if method == "ar" else of.seconds)],
    }


def _refusal(found: Mapping[str, Any]) -> DoesNotFitError:
    """The error of a plan that does not fit, with the plan as the error's document."""
    context, longest = found["context"], found["longest_context"]
    most, shortest = _shortest_context(found)
    if context > most:
        message = f"{context} tokens exceed the {shortest.replace('_', ' ')}'s context of {most}"
    else:
        sequences = "a sequence" if found["batch"] == 1 else f"{found['batch']} sequences"
        message = (
            f"{sequences} of {context} tokens: {render.size(found['planned_bytes'])} of {found['device']} memory needed, "
            f"{render.size(found['available_bytes'])} available"
        )
    fewer = found["largest_batch"]
    ways = [f"-c {longest} or less"] * bool(longest) + [f"--batch {fewer} or less"] * bool(fewer)
    # Smaller weights help if all but the weights fits.
    rest = found["planned_bytes"] - found["weights_bytes"] - found["draft_weights_bytes"]
    helps = context <= most and found["weights"] == "checkpoint" and rest < found["available_bytes"]
    smaller = ["--weights int8 or int4"] * helps
    hint = f"use {', or '.join([*ways, *smaller])}"
    if not ways:
        hint = ", ".join(["not even a short text fits; use fewer sequences", *smaller, "a smaller model"])
        hint += ", or a machine with more memory"
    error = DoesNotFitError(message, hint)
    error.kept = dict(found)
    return error


def _shortest_context(found: Mapping[str, Any]) -> tuple[int, str]:
    """The shortest context of the models, and which of them has it."""
    return min((found[f"{name}_context"], name) for name in ("model", "draft_model") if f"{name}_context" in found)


# Writing -------------------------------------------------------------------------------------------------------------


def lines(found: Mapping[str, Any]) -> list[str]:
    """The plan for people."""
    each = "" if found["batch"] == 1 else f" for each of {found['batch']} sequences"
    most, shortest = _shortest_context(found)
    exceeds = found["context"] > most
    # A context that the model does not have may fit into memory.
    lacking = found["planned_bytes"] > found["available_bytes"] if exceeds else not found["fits"]
    fits = ": does not fit" if lacking else "" if exceeds else ": fits"
    beyond = f", more than the {shortest.replace('_', ' ')}'s {most:,}" if exceeds else ""
    report = [
        f"model       {one_line(found['model'])}: {_weights(found['weights'])}{render.size(found['weights_bytes'])}, "
        f"{'draft model' if 'draft_model' in found else 'draft weights'} {render.size(found['draft_weights_bytes'])}",
        f"memory      {render.size(found['planned_bytes'])} of {render.size(found['available_bytes'])} on "
        f"{found['device']}{fits}",
        f"context     {found['context']:,} tokens{each}{beyond}; longest that fits {found['longest_context']:,}",
        f"batch       {found['batch']}; largest that fits {found['largest_batch']}",
        f"cache       {found['kv_target']}, {render.size(round(found['cache_bytes_per_token']))} per token",
    ]
    if found["predicted"] is not None:
        report += [
            f"bandwidth   {render.number(found['bandwidth_gb_per_s'])} GB/s, {one_line(found['device_name'])}",
            f"prompt      {render.rate(found['predicted']['prefill_tokens_per_s'])}",
            "",
            *_methods(found),
            "",
            *_roofline(found["roofline"]),
        ]
    return [*report, "", *sizes.lines(found["sizes"])] if found["sizes"] else report


def _weights(kept: str) -> str:
    return "weights " if kept == "checkpoint" else f"{kept} weights "


def _methods(found: Mapping[str, Any]) -> list[str]:
    head = f"after {found['context']:,} tokens"
    table = [f"{head:<24} {'tokens/s':>9} {'speed-up':>9} {'gamma':>6} {'if accepted':>12} {'pays from':>10}"]
    for row in found["methods"]:
        name = row["method"] + ("" if row["draft_pages"] == "all" else f", {row['draft_pages']} pages")
        speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
        gamma = "-" if row["gamma"] is None else row["gamma"]
        table.append(
            f"{name:<24} {render.number(row['decode_tokens_per_s']):>9} {speedup:>9} {gamma:>6} "
            f"{render.percent(row['acceptance']):>12} {render.percent(row['pays_from']):>10}"
        )
    return table


def _roofline(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    table = [f"{'operation':<24} {'ms':>9} {'read':>9} {'flops/byte':>11} {'bound by':>9}"]
    for row in rows:
        table.append(
            f"{row['operation']:<24} {render.number(row['us'] / 1e3):>9} {render.size(round(row['bytes'])):>9} "
            f"{render.number(row['intensity']):>11} {row['bound']:>9}"
        )
    return table
