"""`quantspec batch`: a directory of documents in, one answer per document out.

This checks the command and finds its documents (`sources`, `batch_work`). `batch_reader` makes prompts of them, `batch_plan`
sizes the engine, and `batch_run` decodes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import fingerprint, hub, instruct, journal, output, prompts, render, report, schema, sources
from .batch_plan import dry_run
from .batch_reader import Reader
from .batch_run import Run
from .batch_work import Fingerprints, find_work
from .cluster import check_cluster
from .engine import check_folder
from .errors import FileError, IgnoredError, UsageError
from .journal import Journal
from .model import Model

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from .options import EngineOptions, GenerateOptions


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of one `quantspec batch`.

    Attributes:
        paths: directories, files, globs or lists.
        out: folder of the answers.
        suffix: of an answer's file name, after the document's whole name.
        template_args: arguments of the chat template.
        unset: parameters of the command that no flag, variable or setting gave.
        context_from: start of a hint that names the variable or setting of `ctx_size`.
        schema: file of the JSON schema.
        long: treatment of a document beyond the context, "refuse" or "map-reduce".
        parallel: most documents that decode together; None chooses.
        report: file for a page of charts.
        prompt_cache: folder of prompts; None keeps them in memory.
        ray: address of the Ray cluster that decodes, or "auto"; None decodes here.
    """

    model: str | None
    revision: str | None
    offline: bool
    paths: Sequence[str]
    out: str
    suffix: str
    instruction: str | None
    system_prompt: str | None
    template_args: Mapping[str, Any]
    unset: Container[str]
    ctx_size: int
    context_from: str
    schema: str | None
    long: str
    parallel: int | None
    prompt_cache: str | None
    ray: str | None
    resume: bool
    retry_failed: bool
    dry_run: bool
    report: str | None
    as_json: bool
    quiet: bool


def batch(arguments: Arguments, engine_options: EngineOptions, options: GenerateOptions) -> output.Done:
    """Runs a batch; with `--json` the caller prints the report."""
    _check(arguments, options)
    if arguments.ray is not None and ":" in engine_options.device:
        raise UsageError(
            f"device is {engine_options.device}, but a worker of a Ray cluster has one GPU",
            "use auto, cpu or cuda",
            option="device",
        )
    if engine_options.weights == "auto":
        raise UsageError(
            "weights is 'auto', and answers of a resumed run would depend on the memory that is free then",
            "use --weights checkpoint or --weights int8",
            option="weights",
        )
    if arguments.as_json or arguments.dry_run:
        output.Stdout()
    if arguments.ray is not None and not arguments.dry_run:
        check_cluster(arguments.ray)
    out = Path(arguments.out)
    found = _found(arguments, out)
    outputs = {source.name: sources.output_name(source.name, arguments.suffix) for source in found}
    _check_outputs(outputs)
    model = Model.open(
        arguments.model,
        revision=arguments.revision,
        offline=arguments.offline,
        progress=render.on_terminal() and not arguments.quiet,
        draft_model=engine_options.draft_model if arguments.ray is None else None,
    )
    context = model.resolve_context(arguments.ctx_size)
    options = _with_defaults(arguments, options, model, context)
    reader = Reader(model, arguments, options, context)
    fingerprints = _fingerprints(arguments, engine_options, options, model, context)
    places = {source: outputs[source.name] for source in found}
    if arguments.dry_run:
        known, rates = journal.peek(out)
        if arguments.resume:
            journal.check_results(out, known)
        workload = find_work(arguments, places, known, fingerprints)
        todo = {job.source.name: job.output for job in workload.todo}
        workload.foreign = set(journal.foreign(out, todo, known.sizes())) if arguments.resume else set()
        return dry_run(arguments, engine_options, workload, reader, rates.get(fingerprints.speed, {}))
    taken = [arguments.schema, *hub.files_on_disk(arguments.model, engine_options.draft_model), *arguments.paths]
    taken += [str(source.path) for source in found if source.path]
    taken += [str(out / place) for place in (journal.RESULTS, *outputs.values())]
    # The journal first: the page may be in its folder, which the first run creates.
    with Journal(out, replace=not arguments.resume) as kept, report.opened(arguments.report, taken) as page:
        workload = find_work(arguments, places, kept.contents(), fingerprints)
        return Run(arguments, kept, workload, reader, fingerprints, page=page).run(engine_options, found)


def _found(arguments: Arguments, out: Path) -> list[sources.Source]:
    """The documents. A glob that the shell expanded may name files that earlier runs wrote; they are left out."""
    if not (out / sources.STATE / sources.JOURNAL).is_file():
        return sources.find(arguments.paths, out)
    results, folder = os.path.realpath(out / journal.RESULTS), os.path.realpath(out)
    found = sources.find([path for path in arguments.paths if os.path.realpath(path) != results], out)
    inside = {source: os.path.relpath(os.path.realpath(source.path), folder) for source in found if source.path}
    if all(place.startswith("..") for place in inside.values()):
        return found
    try:
        answers = journal.peek(out)[0].answers
    except FileError:
        if arguments.resume:
            raise
        return found  # the damaged journal will be replaced
    documents = [source for source in found if inside.get(source) not in answers]
    if not documents:
        raise UsageError(f"all documents are answers in {out}", "name documents; quote a glob")
    if len(documents) < len(found) and not arguments.quiet:
        render.note(f"left out, as they are answers in {out}: {len(found) - len(documents)}")
    return documents


def _fingerprints(
    arguments: Arguments, engine_options: EngineOptions, options: GenerateOptions, model: Model, context: int
) -> Fingerprints:
    """What the answers and failures of this run depend on, besides the document."""
    model_print = fingerprint.of_model(model)

    def of(basis: str, **request: Any) -> str:
        return fingerprint.of_answer(basis, engine_options, options, **request)

    answer = of(
        model_print,
        instruction=arguments.instruction,
        system_prompt=arguments.system_prompt,
        template_args=arguments.template_args,
    )
    # An answer in one call is the same with and without --long.
    in_context = {"context": context, "shortens": options.shortens}
    split = {"long": arguments.long, **in_context}
    # A failed document may succeed on another device, with a longer context or with the packages of the extra `documents`.
    packages = [name for name in ("pypdf", "cryptography") if find_spec(name)]
    failure = of(answer, **split, device=engine_options.device, packages=packages)
    return Fingerprints(
        model=model_print,
        speed=fingerprint.of_speed(model_print, engine_options),
        answer=answer,
        shortened=of(answer, **in_context),
        split=of(answer, **split),
        failure=failure,
    )


def _with_defaults(arguments: Arguments, options: GenerateOptions, model: Model, context: int) -> GenerateOptions:
    """The options, with the model's recommendations for all that the user did not set, as in `run`; notes report them."""
    sample = model.prompt(
        "A document.",
        instruction=arguments.instruction,
        system_prompt=arguments.system_prompt,
        template_args=arguments.template_args,
        context=context,
    )
    options, notes = instruct.resolve_defaults(
        model, [sample], options, unset=arguments.unset, arguments=arguments.template_args
    )
    schema.check(model, [sample], options.json_schema)
    if not arguments.quiet and not arguments.as_json:
        for line in notes:
            render.note(line)
        render.note_of_template(model, arguments.instruction, arguments.system_prompt)
    return options


def _check(arguments: Arguments, options: GenerateOptions) -> None:
    prompts.check_arguments(arguments.instruction, arguments.system_prompt, options.stop)
    if prompts.STDIN in arguments.paths and not Path(prompts.STDIN).exists():
        raise UsageError(
            "batch takes no standard input",
            "name documents, or a list.jsonl with their texts; quantspec run - answers standard input",
        )
    if not arguments.out:
        raise UsageError("the name of the output folder is empty", "name a folder after --out", option="out")
    if (
        not arguments.suffix.startswith(".")
        or "/" in arguments.suffix
        or "\0" in arguments.suffix
        or len(arguments.suffix) > 32
    ):
        raise UsageError(
            f"suffix is {arguments.suffix!r:.60}",
            "use a short one that begins with a dot, such as .md",
            option="suffix",
        )
    prompts.check_utf8("the suffix", arguments.suffix)
    if arguments.report is not None and arguments.dry_run:
        raise UsageError("--report with --dry-run", "leave out one of them: a dry run has nothing to show")
    if arguments.report is not None:
        _check_report(arguments.report, arguments.paths, arguments.out)
    if arguments.prompt_cache is not None:
        check_folder(arguments.prompt_cache)
        _check_prompt_cache(arguments.prompt_cache, arguments.paths, arguments.out)
    if arguments.ray is not None and not arguments.ray.strip():
        raise UsageError("ray is empty", "use HOST:PORT, or auto", option="ray")
    if arguments.long == "map-reduce" and arguments.instruction is None:
        raise IgnoredError(
            "long is map-reduce without an instruction",
            "give an --instruction for the parts and for the partial answers",
            option="long",
        )
    if arguments.parallel is not None and not 1 <= arguments.parallel <= 1024:
        raise UsageError(f"parallel is {arguments.parallel}", "use 1 to 1024, or auto", option="parallel")


def _check_report(name: str, paths: Sequence[str], out: str) -> None:
    """Refuses a report among the journal's files, or one that the next run would read as a document."""
    if Path(name).resolve().is_relative_to(Path(out).resolve() / sources.STATE):
        raise UsageError(
            f"the report {name} would be among the files of the journal",
            "name a file in another folder",
            option="report",
        )
    for path in paths:
        if sources.would_find(path, name, Path(out)):
            raise UsageError(
                f"the report {name} would be a document of {path}", "name a file in another folder", option="report"
            )


def _check_prompt_cache(folder: str, paths: Sequence[str], out: str) -> None:
    """Refuses a folder of prompts that the next run would read as documents."""
    for path in paths:
        if sources.would_find(path, f"{folder}/x.prompt", Path(out)):
            raise UsageError(
                f"files of the prompt cache {folder} would be documents of {path}",
                "name a folder outside of the documents",
                option="prompt_cache",
            )


def _check_outputs(outputs: Mapping[str, str]) -> None:
    names: dict[str, str] = {}
    for name, place in outputs.items():
        parts = place.split("/")
        if ".." in parts or parts[0] in {journal.RESULTS, sources.STATE}:
            raise UsageError(
                f"the answer to {sources.shown(name)} would be {sources.shown(place)}, which is no place for one",
                "use another --suffix, or a list.jsonl with an id for the document",
            )
        other = names.setdefault(place, name)
        if other != name:
            raise UsageError(
                f"{sources.shown(other)} and {sources.shown(name)} would have one answer", "rename one of them"
            )
    for name, place in outputs.items():
        parts = place.split("/")
        for folder in ("/".join(parts[:end]) for end in range(1, len(parts))):
            if folder in names:
                raise UsageError(
                    f"the answer to {sources.shown(names[folder])} would be {sources.shown(folder)}, the folder of the "
                    f"answer to {sources.shown(name)}",
                    "use another --suffix",
                )
