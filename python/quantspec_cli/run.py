"""`quantspec run`: prompts in, answers out."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from . import __version__, output, prompts, render
from .engine import Engine, Model
from .errors import EXIT_DONE, EXIT_INTERRUPTED, QuantspecError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .engine import Batch, Generation, Prompt
    from .options import EngineOptions, GenerateOptions
    from .prompts import Document


@dataclass(frozen=True, kw_only=True)
class Request:
    """What one `quantspec run` was asked for."""

    model: str | None
    revision: str | None
    offline: bool
    prompts: Sequence[str]
    texts: Sequence[str]
    instruction: str | None
    system_prompt: str | None
    output: str | None
    ctx_size: int
    as_json: bool
    quiet: bool


def run(request: Request, engine_options: EngineOptions, options: GenerateOptions) -> output.Done:
    """Runs; with `--json` the report is left to be printed."""
    arguments = {"the instruction": request.instruction, "the system prompt": request.system_prompt}
    for name, text in [*arguments.items(), *(("a stop string", stop) for stop in options.stop)]:
        prompts.check_utf8(name, text or "")
    stdout = output.Stdout() if request.output is None or request.as_json else None
    with output.opened(request.output, request.prompts) as file:
        documents = prompts.read_all(request.prompts, request.texts)
        model = Model.open(
            request.model,
            revision=request.revision,
            offline=request.offline,
            progress=render.on_terminal() and not request.quiet,
        )
        if not request.as_json and not request.quiet and _is_bare(request, model):
            render.note("the model has no chat template: system prompt, document and instruction are plain text to it")
        if not request.quiet:
            render.warn_of_documents(documents)
            render.warn_of_threads(engine_options.threads)
        limit = model.resolve_context(request.ctx_size)
        encoded = [
            model.prompt(
                document.text,
                instruction=request.instruction,
                system_prompt=request.system_prompt,
                name=document.name,
                context=limit,
            )
            for document in documents
        ]
        context = max(model.check_fits(prompt, options.max_new_tokens, limit) for prompt in encoded)
        with render.progress("loading weights", shown=not request.quiet) as on_loading:
            engine = Engine(
                model,
                engine_options,
                context=context,
                longest_prompt=max(len(prompt.ids) for prompt in encoded),
                batch=len(encoded),
                on_loading=on_loading,
            )
        if not request.quiet:
            render.note_of_drafts(engine.info)

        sink: output.Sink = file or (stdout if stdout is not None and not request.as_json else output.Nowhere())
        shown = [one_line(document.name) for document in documents]
        answers = output.Answers(sink, shown)
        batch, interrupted, failure = _decode(engine, encoded, options, answers, quiet=request.quiet)
    # The file is in its place: nothing that happens to the rest of the output can take the answer away.
    generations = batch.generations()
    if failure is not None:
        failure.kept = {"results": results(documents, generations)}
        raise failure
    code = EXIT_INTERRUPTED if interrupted else EXIT_DONE
    if request.as_json:
        return output.Done(code, report(engine, options, documents, generations))
    if not request.quiet:
        render.statistics(engine, shown, generations)
    return output.Done(code)


def report(
    engine: Engine, options: GenerateOptions, documents: Sequence[Document], generations: Sequence[Generation]
) -> dict[str, Any]:
    """The document of `--json`."""
    chosen = engine.options
    return {
        "quantspec": __version__,
        "model": engine.model.name,
        "device": engine.info["device"],
        "method": chosen.method,
        "kv_target": chosen.kv_target,
        "kv_rounding": chosen.kv_rounding,
        "draft_weights": chosen.draft_weights,
        "draft_pages": chosen.draft_pages,
        "page_choice": chosen.page_choice,
        "accept": "greedy" if options.temperature == 0 else chosen.accept,
        "gamma": 0 if chosen.method == "ar" else chosen.gamma,
        "temperature": options.temperature,
        "seed": options.seed,
        "results": results(documents, generations),
        "stats": engine.statistics(),
    }


def results(documents: Sequence[Document], generations: Sequence[Generation]) -> list[dict[str, Any]]:
    """The answers as `--json` prints them."""
    return [
        {
            "prompt": document.name,
            "prompt_tokens": generation.prompt_tokens,
            "new_tokens": len(generation.tokens),
            "tokens": generation.tokens,
            "text": generation.text,
            "stop_reason": generation.stop_reason,
            **({"warnings": list(document.warnings)} if document.warnings else {}),
        }
        for document, generation in zip(documents, generations, strict=True)
    ]


def _decode(
    engine: Engine, prompts: Sequence[Prompt], options: GenerateOptions, answers: output.Answers, *, quiet: bool
) -> tuple[Batch, bool, QuantspecError | None]:
    """Decodes and hands on the text. Ctrl-C ends it with the text so far, and so does an error of the engine: the second and
    third value say so. Before the first token there is nothing to keep, and either is raised.
    """
    first: list[tuple[int, str]] = []
    interrupted = False
    failures: list[QuantspecError] = []
    with render.progress("reading the prompt", shown=not quiet) as on_prefill:
        batch = engine.start(prompts, options, on_prefill=on_prefill)
        pieces = output.until_failure(batch, failures)
        try:
            # The first texts wait until the bar has left the terminal.
            first.extend(islice(pieces, len(prompts)))
        except KeyboardInterrupt:
            interrupted = True
    if not any(text.tokens for text in batch.texts):
        if failures:
            raise failures[0]
        if interrupted:
            raise KeyboardInterrupt
    try:
        for index, text in chain(first, () if interrupted else pieces):
            answers.push(index, text)
            if batch.texts[index].stop_reason is not None:
                answers.end(index)
    except KeyboardInterrupt:
        interrupted = True
    if interrupted or failures:
        batch.interrupt()
        for index, answer in enumerate(batch.texts):
            answers.push_rest(index, answer.text)
    answers.close()
    return batch, interrupted, failures[0] if failures else None


def _is_bare(request: Request, model: Model) -> bool:
    asked = request.instruction is not None or request.system_prompt is not None
    return asked and model.chat_template is None
