"""`quantspec run`: prompts in, answers out."""

from __future__ import annotations

import contextlib
import json
import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from . import __version__, hub, instruct, output, prompts, render, schema
from .engine import Engine, check_folder
from .errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PARTIAL, QuantspecError, one_line
from .model import Model, planned
from .options import METHODS
from .slots import Opening, together

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from .generation import Batch, Generation
    from .model import Prompt
    from .options import EngineOptions, GenerateOptions
    from .prompts import Document

# Most prompts that decode together; the others wait. More gain little (docs/benchmarks.md, batches).
MOST_TOGETHER = 32

# A result without an answer.
_UNANSWERED: dict[str, object] = {
    "prompt_tokens": None,
    "new_tokens": 0,
    "tokens": [],
    "text": "",
    "stop_reason": None,
    "thinking": None,
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of one `quantspec run`.

    Attributes:
        template_args: arguments of the chat template.
        unset: parameters of the command that no flag, variable or setting gave.
        context_from: start of a hint that names the variable or setting of `ctx_size`.
        schema: file of the JSON schema.
    """

    model: str | None
    revision: str | None
    offline: bool
    prompts: Sequence[str]
    texts: Sequence[str]
    instruction: str | None
    system_prompt: str | None
    template_args: Mapping[str, Any]
    unset: Container[str]
    output: str | None
    ctx_size: int
    context_from: str
    schema: str | None
    prompt_cache: str | None
    as_json: bool
    quiet: bool


def run(arguments: Arguments, engine_options: EngineOptions, options: GenerateOptions) -> output.Done:
    """Decodes the prompts and prints the answers; the caller prints the document of `--json`."""
    with contextlib.ExitStack() as engines:
        return _run(arguments, engine_options, options, engines)


def _run(
    arguments: Arguments, engine_options: EngineOptions, options: GenerateOptions, engines: contextlib.ExitStack
) -> output.Done:
    prompts.check_arguments(arguments.instruction, arguments.system_prompt, options.stop)
    if arguments.prompt_cache is not None:
        check_folder(arguments.prompt_cache)
    stdout = output.Stdout() if arguments.output is None or arguments.as_json else None
    inputs = [*arguments.prompts, arguments.schema, *hub.files_on_disk(arguments.model, engine_options.draft_model)]
    with output.opened(arguments.output, inputs) as file:
        documents = prompts.read_all(arguments.prompts, arguments.texts)
        model = Model.open(
            arguments.model,
            revision=arguments.revision,
            offline=arguments.offline,
            progress=render.on_terminal() and not arguments.quiet,
            draft_model=engine_options.draft_model,
        )
        if not arguments.quiet:
            render.warn_of_documents(documents)
            render.warn_of_threads(engine_options.threads)
        documents, encoded, options, context = _encoded(arguments, model, documents, options)
        failed = render.errors_of_documents(documents)
        engine = engines.enter_context(_opened(arguments, model, engine_options, encoded, options, context=context))
        if not arguments.quiet:
            render.note_of_drafts(engine.info)
            render.note_of_weights(engine_options.weights, model, engine.info)
            render.note_of_emulation([engine_options.method])
            render.note_of_idle(engine_options, options.temperature)

        # The document of `--json` has the answers even if the file fails.
        copy = output.Copy(file) if file is not None and arguments.as_json else None
        printed = None if arguments.as_json else stdout
        sink: output.Sink = copy or file or printed or output.NullSink()
        shown = [one_line(document.name) for document in documents if document.error is None]
        answers = output.Answers(sink, shown, headings=len(documents) > 1)
        batch, interrupted, failure = _decode(engine, encoded, options, answers, quiet=arguments.quiet)
        unwritten = None if copy is None else copy.complete()
    if failure is None and not arguments.quiet:
        render.note_of_prompts(engine)
    # The file is complete first, so that errors of other output cannot lose the answer.
    generations = batch.generations()
    if failure is not None:
        failure.kept = {"results": results(model, documents, generations)}
        raise failure
    if unwritten is not None and interrupted:
        # The exit code is that of the interruption, which the user caused last.
        render.note(f"warning: {unwritten.message}")
    elif unwritten is not None:
        unwritten.kept = report(engine, options, documents, generations)
        raise unwritten
    code = EXIT_INTERRUPTED if interrupted else EXIT_PARTIAL if failed else EXIT_DONE
    if arguments.as_json:
        return output.Done(code, report(engine, options, documents, generations))
    if not arguments.quiet:
        cuts = instruct.truncation_notes(shown, encoded, generations, options, context=context, longest=model.context)
        for line in cuts:
            render.note(line)
        render.statistics(engine, shown, generations)
    return output.Done(code)


def _opened(
    arguments: Arguments,
    model: Model,
    engine_options: EngineOptions,
    prompts: Sequence[Prompt],
    options: GenerateOptions,
    *,
    context: int,
) -> Engine:
    """An engine that decodes the prompts together, or as many of them as memory holds; the others wait."""
    batch, pool = 1, None
    if len(prompts) > 1:
        # Stays open until the engine has opened it, too.
        device = Opening(model, engine_options).take()
        plan_of = partial(planned, model, engine_options, opened=device)
        lengths = [len(prompt.ids) + options.new_tokens(len(prompt.ids), context) for prompt in prompts]
        batch, pool = together(plan_of, context, lengths, MOST_TOGETHER)
    with render.progress("loading weights", shown=not arguments.quiet) as on_loading:
        return Engine(
            model,
            engine_options,
            context=context,
            longest_prompt=max(len(prompt.ids) for prompt in prompts),
            batch=batch,
            pool=pool,
            prompt_cache=arguments.prompt_cache or False,
            on_loading=on_loading,
        )


def _encoded(
    arguments: Arguments, model: Model, documents: Sequence[Document], options: GenerateOptions
) -> tuple[list[Document], list[Prompt], GenerateOptions, int]:
    """The documents, with an error if they do not fit; the prompts of the others, the options with the model's
    recommendations, and the tokens of the longest sequence. Notes report what was chosen.
    """
    limit = model.resolve_context(arguments.ctx_size)
    # The default shrinks to what a prompt leaves.
    least = 1 if "max_tokens" in arguments.unset else options.max_new_tokens
    encoded: list[Prompt] = []

    def encode(document: Document) -> Document:
        with model.naming_context(limit, arguments.context_from):
            prompt = model.prompt(
                document.text,
                instruction=arguments.instruction,
                system_prompt=arguments.system_prompt,
                template_args=arguments.template_args,
                name=document.name,
                context=limit,
            )
            model.check_fits(prompt, least, limit)
        encoded.append(prompt)
        return document

    documents = prompts.attempted((document, partial(encode, document)) for document in documents)
    options, notes = instruct.resolve_defaults(
        model, encoded, options, unset=arguments.unset, arguments=arguments.template_args
    )
    if not arguments.as_json and not arguments.quiet:
        render.note_of_template(model, arguments.instruction, arguments.system_prompt)
        for line in notes:
            render.note(line)
    schema.check(model, encoded, options.json_schema)
    return (
        documents,
        encoded,
        options,
        max(len(prompt.ids) + options.new_tokens(len(prompt.ids), limit) for prompt in encoded),
    )


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
        "weights": engine.info["weights"],
        "kv_target": chosen.kv_target,
        "kv_rounding": chosen.kv_rounding,
        "draft_weights": chosen.weights_of_draft,
        "draft_precision": engine.info["draft_precision"],
        "draft_pages": chosen.pages_of_draft,
        "page_choice": chosen.choice_of_pages,
        **({} if chosen.draft_refresh == 0 else {"draft_refresh": chosen.draft_refresh}),
        **(
            {}
            if chosen.draft_model is None
            else {"draft_model": chosen.draft_model, "draft_model_kv": chosen.view_of_draft_model}
        ),
        "accept": "greedy" if options.temperature == 0 else chosen.accept,
        "gamma": chosen.gamma if METHODS[chosen.method].drafts else 0,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "repetition_penalty": options.repetition_penalty,
        "frequency_penalty": options.frequency_penalty,
        "presence_penalty": options.presence_penalty,
        "no_repeat_ngram": options.no_repeat_ngram,
        "seed": options.seed,
        **({} if options.json_schema is None else {"json_schema": json.loads(options.json_schema)}),
        "results": results(engine.model, documents, generations),
        "stats": engine.statistics(),
    }


def results(model: Model, documents: Sequence[Document], generations: Sequence[Generation]) -> list[dict[str, Any]]:
    """The answers as `--json` prints them; a document with an error has no generation."""
    answers = iter(generations)

    def named(id: int, logprob: float) -> dict[str, Any]:
        return {"id": id, "token": model.tokenizer.token_bytes(id).decode(errors="replace"), "logprob": logprob}

    def as_logprobs(generation: Generation) -> dict[str, Any]:
        if generation.logprobs is None:
            return {}
        # JSON has no infinity; a masked token is left out.
        content = [
            {
                **named(one.id, one.logprob),
                "top_logprobs": [named(*other) for other in one.top if math.isfinite(other[1])],
            }
            for one in generation.logprobs
        ]
        return {"logprobs": {"content": content}}

    def answer(generation: Generation) -> dict[str, Any]:
        return {
            "prompt_tokens": generation.prompt_tokens,
            "new_tokens": len(generation.tokens),
            "tokens": generation.tokens,
            "text": generation.text,
            "stop_reason": generation.stop_reason,
            "thinking": generation.thinking,
            **as_logprobs(generation),
        }

    return [
        {
            "prompt": document.name,
            **(answer(next(answers)) if document.error is None else _UNANSWERED | document.error.to_json()),
            **({"warnings": list(document.warnings)} if document.warnings else {}),
        }
        for document in documents
    ]


def _decode(
    engine: Engine, prompts: Sequence[Prompt], options: GenerateOptions, answers: output.Answers, *, quiet: bool
) -> tuple[Batch, bool, QuantspecError | None]:
    """Decodes and passes the text on. Ctrl-C or an error of the engine ends it with the text so far, and is returned as
    second or third value. Before the first token there is nothing to keep, and either is raised.
    """
    interrupted = False
    failures: list[QuantspecError] = []
    # Closed when the first text appears, so that no bar is inside an answer.
    with contextlib.ExitStack() as bar:
        progress = render.progress("reading the prompt", shown=not quiet, layers=engine.model.info["layers"])
        on_prefill = bar.enter_context(progress)
        batch = engine.start(prompts, options, on_prefill=on_prefill)
        try:
            for piece in output.until_failure(batch, failures):
                if piece.text:
                    bar.close()
                answers.push(piece.prompt, piece.text)
                if piece.last:
                    answers.end(piece.prompt)
        except KeyboardInterrupt:
            interrupted = True
            batch.interrupt()
    if not any(text.tokens for text in batch.texts):
        if failures:
            raise failures[0]
        if interrupted:
            raise KeyboardInterrupt
    if interrupted or failures:
        batch.interrupt()
        for index, answer in enumerate(batch.texts):
            answers.push_rest(index, answer.text)
    answers.close()
    return batch, interrupted, failures[0] if failures else None
