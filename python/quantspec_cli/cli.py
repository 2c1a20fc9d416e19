"""The command line. Each command parses its flags, calls its module and returns an exit code.

Modules that load the engine, a tokenizer or rich are imported inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from . import __version__, settings
from .errors import IgnoredError, QuantspecError, UsageError
from .flags import (
    Lists,
    NumberOr,
    chat_flags,
    choice_flag,
    device_flags,
    draft_model_flag,
    draft_model_kv_flag,
    draft_precision_flag,
    draft_refresh_flag,
    engine_flags,
    file_flag,
    json_flag,
    model_flags,
    output_flag,
    page_choice_flag,
    prompt_cache_flag,
    report_flag,
    sampling_flags,
    stop_flag,
)
from .options import (
    ACCEPTANCE,
    AXES,
    GROUPS,
    KV_ROUNDINGS,
    KV_TARGETS,
    LOGPROBS_MAX,
    METHODS,
    TRUNCATE,
    WEIGHTS,
    EngineOptions,
    GenerateOptions,
    no_draft_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    from .flags import Command
    from .output import Done

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
# QUANTSPEC_GAMMA and similar variables apply to every command with that flag.
_CONTEXT = {"auto_envvar_prefix": settings.PREFIX, **_HELP}

_EXIT_CODES = """\b
Exit codes: 0 done, 1 error, 2 usage, 3 does not fit in memory or context
(nothing was cut), 4 finished with failed documents, 130 interrupted
(129 SIGHUP, 143 SIGTERM), 141 standard output was closed."""


# Flags that chat templates alone use.
_OF_TEMPLATES = {"thinking", "template_arg"}


class _Parser(click.Command):
    """Reports an error of standard output while click writes help or the version, which it does while it parses."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses, or writes help."""
        try:
            return super().parse_args(ctx, args)
        except BrokenPipeError:
            raise
        except OSError as error:
            from .output import unwritable

            raise unwritable(error) from error


class _Command(_Parser):
    """A command that reports errors of the settings file only when it runs, so that `--help` always works. Its errors about
    an option name the flag and the source of the value. Variables and settings without effect are left out.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command, or reports why the settings file cannot be used."""
        if isinstance(ctx.obj, QuantspecError):
            raise ctx.obj
        while True:
            try:
                return super().invoke(ctx)
            except QuantspecError as error:
                if isinstance(error, IgnoredError) and settings.left_out(error, ctx):
                    continue
                settings.locate(error, ctx)
                raise


class _Group(_Parser, click.Group):
    command_class = _Command


class _FileName(click.types.StringParamType):
    """A name that shells complete as a file or folder."""

    def shell_complete(self, _ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type="file")]


def _complete_files(command: click.Command) -> None:
    """Gives that type to every parameter whose value is the name of a file or folder, by its metavar."""
    for param in command.params:
        if param.type is click.STRING and re.search("FILE|DIR|PATH", param.metavar or ""):
            param.type = _FileName()


@click.group(cls=_Group, context_settings=_HELP, epilog=_EXIT_CODES)
@click.version_option(__version__, prog_name="quantspec")
@click.option(
    "--config",
    metavar="FILE",
    envvar="QUANTSPEC_CONFIG",
    help="Settings file (TOML).  [default: ~/.config/quantspec/config.toml]",
)
@click.pass_context
def cli(ctx: click.Context, config: str | None) -> None:
    """Decode long documents faster without changing a token.

    A Llama-family model drafts for itself with 4-bit weights over a 4-bit view of its cache, and verifies with full
    weights over the 8-bit view. Flags override QUANTSPEC_* variables (QUANTSPEC_MODEL, ...), which override the
    settings file.
    """
    try:
        ctx.default_map = settings.default_map(config, cli.commands)
    except QuantspecError as error:
        ctx.obj = error


@cli.command(context_settings=_CONTEXT, epilog=_EXIT_CODES, short_help="Answer or continue documents.")
@click.argument("documents", nargs=-1, metavar="[FILE]...")
@model_flags
@click.option(
    *("-p", "--prompt", "prompt"),
    multiple=True,
    metavar="FILE",
    allow_from_autoenv=False,
    help="The same as a FILE argument. Repeatable; the documents decode together.",
)
@click.option(
    "--text", multiple=True, allow_from_autoenv=False, help="A prompt as text. Repeatable; texts follow the files."
)
@click.option("--instruction", metavar="TEXT", help="What to do with each document, through the model's chat template.")
@click.option("--system-prompt", metavar="TEXT", help="System prompt, for the model's chat template.")
@chat_flags
@output_flag(
    *("-o", "--output", "output"),
    text="Write the answer to this file instead of stdout; it appears when complete. Ctrl-C keeps the text so far.",
)
@click.option("-c", "--ctx-size", type=int, default=0, metavar="N", help="Context in tokens.  [default: the model's]")
@sampling_flags
@stop_flag
@prompt_cache_flag()
@click.option(
    "--logprobs",
    type=int,
    metavar="K",
    help=f"With --json: log-probabilities of each token and of the K most likely, 0 to {LOGPROBS_MAX}.",
)
@engine_flags
@device_flags
@json_flag
@click.option(
    "-q", "--quiet", is_flag=True, help="Nothing on stderr but errors: no warnings about missing text either."
)
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    documents: tuple[str, ...],
    prompt: tuple[str, ...],
    text: tuple[str, ...],
    output: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    thinking: str | None,
    template_arg: tuple[str, ...],
    **flags: Any,
) -> Done:
    """Answer or continue documents: text to stdout, statistics to stderr.

    FILE is a text, Markdown, HTML, DOCX, EPUB or PDF document, or - for standard input.
    """
    if not flags["as_json"]:
        if ctx.get_parameter_source("logprobs") is ParameterSource.COMMANDLINE:
            raise UsageError("--logprobs without --json", "add --json: its document has them")
        flags["logprobs"] = None
    generate_options, engine_options = _options(flags, max_tokens, stop)

    template_args = _template_args(ctx, thinking, template_arg)

    from .run import Arguments
    from .run import run as execute

    arguments = Arguments(
        prompts=documents + prompt,
        texts=text,
        output=output,
        template_args=template_args,
        unset=_unset(ctx),
        context_from=_context_from(ctx),
        **flags,
    )
    return execute(arguments, engine_options, generate_options)


@cli.command(
    context_settings=_CONTEXT, epilog=_EXIT_CODES, short_help="Answer a directory of documents, one file each."
)
@click.argument("paths", nargs=-1, metavar="PATH...")
@click.option("--out", metavar="DIR", required=True, allow_from_autoenv=False, help="Folder of the answers.")
@model_flags
@click.option("--instruction", metavar="TEXT", help="What to do with each document, through the model's chat template.")
@click.option("--system-prompt", metavar="TEXT", help="System prompt, for the model's chat template.")
@chat_flags
@choice_flag(
    "--long", ("refuse", "map-reduce"), text="A document beyond the context: refuse it, or answer it in parts."
)
@click.option("--suffix", metavar="TEXT", default=".md", show_default=True, help="Suffix of the answer files.")
@click.option(
    *("--parallel", "-np", "parallel"),
    type=NumberOr("auto"),
    metavar="N|auto",
    default="auto",
    show_default=True,
    help="Maximum number of documents, or parts of one, that decode together.",
)
@click.option("--ray", metavar="ADDRESS|auto", help="Decode on a Ray cluster: one engine per GPU, or per node.")
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Skip documents that are done and unchanged; --no-resume repeats all, and answers replace any file in their "
    "place.",
)
@click.option("--retry-failed", is_flag=True, help="Retry failed documents even if unchanged.")
@click.option("--dry-run", is_flag=True, allow_from_autoenv=False, help="Print the work to do, and stop.")
@report_flag
@click.option("-c", "--ctx-size", type=int, default=0, metavar="N", help="Context in tokens.  [default: the model's]")
@sampling_flags
@stop_flag
@prompt_cache_flag()
@engine_flags
@device_flags
@json_flag
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
@click.pass_context
def batch(
    ctx: click.Context,
    /,
    *,
    max_tokens: int,
    parallel: int | str,
    stop: tuple[str, ...],
    thinking: str | None,
    template_arg: tuple[str, ...],
    **flags: Any,
) -> Done:
    """Answer every document of a directory: one file each in --out, resumable.

    PATH is a directory, a file, a quoted glob, or a list.jsonl of {"path": ...} or {"id": ..., "text": ...}.
    """
    generate_options, engine_options = _options(flags, max_tokens, stop)
    template_args = _template_args(ctx, thinking, template_arg)

    from .batch import Arguments
    from .batch import batch as execute

    at_once = None if isinstance(parallel, str) else parallel
    arguments = Arguments(
        parallel=at_once,
        template_args=template_args,
        unset=_unset(ctx),
        context_from=_context_from(ctx),
        **flags,
    )
    return execute(arguments, engine_options, generate_options)


def _options(flags: dict[str, Any], max_tokens: int, stop: tuple[str, ...]) -> tuple[GenerateOptions, EngineOptions]:
    """Extracts the decoding options from a command's flags."""
    named = {field for field in GenerateOptions.__dataclass_fields__ if field in flags}
    sampling = {name: flags.pop(name) for name in named}
    # Its file is an input, which no output may replace.
    flags["schema"] = sampling["json_schema"]
    if sampling["json_schema"] is not None:
        from .schema import read

        sampling["json_schema"] = read(sampling["json_schema"])
    generate_options = GenerateOptions(max_new_tokens=max_tokens, stop=stop, **sampling)
    return generate_options, EngineOptions(**{name: flags.pop(name) for name in EngineOptions.__dataclass_fields__})


def _unset(ctx: click.Context) -> frozenset[str]:
    """Parameters at their defaults: no flag, variable or setting gave them."""
    return frozenset(name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.DEFAULT)


def _context_from(ctx: click.Context) -> str:
    """The start of a hint about a prompt beyond the context: the source of --ctx-size if no flag gave it."""
    (parameter,) = (parameter for parameter in ctx.command.params if parameter.name == "ctx_size")
    return settings.origin(ctx, parameter, "the context")


def _template_args(ctx: click.Context, thinking: str | None, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of the chat template. If it is not used, flags are refused; variables and settings may be meant for other
    commands."""
    from .conversation import parsed_arguments

    if ctx.params["instruction"] is not None or ctx.params["system_prompt"] is not None:
        return parsed_arguments(thinking, pairs)
    for parameter in ctx.command.params:
        name = parameter.name or ""
        if name in _OF_TEMPLATES and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = settings.flag_of(parameter)
            raise UsageError(
                f"{flag} does not apply to a document that is continued",
                f"add --instruction or --system-prompt, or leave out {flag}",
            )
    return {}


@cli.command(context_settings=_CONTEXT, short_help="Show what this machine supports.")
@json_flag
def doctor(as_json: bool) -> Done:
    """Show what this machine supports: processor, GPU (or why it is unavailable), memory, models that fit, versions."""
    from .doctor import doctor as execute

    return execute(as_json=as_json)


@cli.command(context_settings=_CONTEXT, short_help="List draft weights and prompts on disk.")
@click.option(
    "--clear",
    is_flag=True,
    allow_from_autoenv=False,
    help="Remove the listed files: draft weights, and with --prompt-cache also prompts. They are recreated when needed.",
)
@prompt_cache_flag("Also list the prompts in this folder.")
@json_flag
def cache(*, clear: bool, prompt_cache: str | None, as_json: bool) -> Done:
    """List the draft weights and prompts on disk: size, last use, model."""
    from .cache import cache as execute

    return execute(clear=clear, prompt_cache=prompt_cache, as_json=as_json)


@cli.command(context_settings=_CONTEXT, short_help="Verify that speculation changes no token.")
@model_flags
@choice_flag("--weights", WEIGHTS, text="The target's weights.")
@draft_model_flag("Also test drafts of this checkpoint, which has the same tokenizer.")
@device_flags
@json_flag
def selftest(*, device: str, threads: int | None, weights: str, **flags: Any) -> Done:
    """Verify on this machine that speculation changes no token. Exit code 1 at the first difference."""
    from .selftest import selftest as execute

    options = EngineOptions(device=device, threads=threads, weights=weights)
    return execute(options=options, **flags)


@cli.command(context_settings=_CONTEXT, epilog=_EXIT_CODES, short_help="Predict memory and speed of a model.")
@model_flags
@click.option("-c", "--ctx-size", type=int, default=0, metavar="N", help="Context in tokens.  [default: the model's]")
# bench has a list flag of the same name, whose value a variable may hold.
@click.option(
    "--batch",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    allow_from_autoenv=False,
    help="Sequences that decode together.",
)
@choice_flag("--weights", WEIGHTS, text="The target's weights.")
@choice_flag("--kv-target", KV_TARGETS, text="View of the cache that defines the output.")
@click.option(
    "--acceptance",
    type=float,
    metavar="SHARE",
    help="Probability that a drafted token is accepted.  [default: by method]",
)
@draft_model_flag("Plan for this checkpoint as the drafter. Its tokenizer is not compared.")
@draft_model_kv_flag
@device_flags
@json_flag
def plan(
    *,
    device: str,
    threads: int | None,
    weights: str,
    kv_target: str,
    draft_model: str | None,
    draft_model_kv: str | None,
    **flags: Any,
) -> Done:
    """Predict, before a download, whether a model fits on this machine, with which context and batch, and how fast.

    Weights are not read: for a model on the hub only its configuration is fetched. Speeds are predicted from passes
    with made-up weights on a CPU, or a GPU's memory bandwidth, which take some seconds to measure.
    """
    from .plan import Arguments
    from .plan import plan as execute

    drafted: dict[str, Any] = {}
    if draft_model is None and draft_model_kv is not None:
        raise no_draft_model(draft_model_kv)
    if draft_model is not None:
        drafted = {"method": "draft-model", "draft_model": draft_model, "draft_model_kv": draft_model_kv}
    options = EngineOptions(device=device, threads=threads, weights=weights, kv_target=kv_target, **drafted)
    return execute(Arguments(**flags), options)


# Flags of `bench kernels`; other flags of `bench` would be ignored. `--rows` belongs to it alone.
_OF_KERNELS = {
    "what",
    "model",
    "revision",
    "offline",
    "n_depth",
    "rows",
    "device",
    "output_format",
    "output",
    "as_json",
}
_ONLY_OF_KERNELS = {"rows"}
# What `bench --compare` takes.
_OF_COMPARE = {"compare", "output_format", "output", "as_json"}


def _refuse_unused(ctx: click.Context, what: str | None) -> None:
    """Refuses flags that would be ignored. Variables and settings may be ignored, as they apply to several commands."""
    if what is not None and ctx.params["compare"]:
        raise UsageError("bench kernels with --compare", "leave out one of them")
    compares = "bench --compare" if ctx.params["compare"] else "bench without kernels"
    form = "bench kernels" if what == "kernels" else compares
    for parameter in ctx.command.params:
        name = parameter.name or ""
        match form:
            case "bench --compare":
                used = name in _OF_COMPARE
            case "bench kernels":
                used = name in _OF_KERNELS
            case _:
                used = name not in _ONLY_OF_KERNELS
        if not used and ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            flag = settings.flag_of(parameter)
            raise UsageError(f"{flag} does not apply to {form}", f"leave out {flag}")


def _refuse_two_forms(ctx: click.Context, form: str) -> None:
    """Refuses an output form other than that of `--json`. A form from a variable or the settings file yields to the flag."""
    if form != "json" and ctx.get_parameter_source("output_format") is ParameterSource.COMMANDLINE:
        raise UsageError(f"--json with --output-format {form}", "leave out one of them")


def _list_flag(*names: str, default: str, text: str) -> Callable[[Command], Command]:
    """A flag for a comma-separated list, or several; its command parses it."""
    return click.option(*names, cls=Lists, default=default, show_default=True, metavar="LIST", help=text)


@cli.command(context_settings=_CONTEXT, epilog=_EXIT_CODES, short_help="Measure prefill and decoding.")
@click.argument("what", type=click.Choice(("kernels",)), required=False)
@model_flags
@file_flag("--prompt", text="Text for the tests, - for standard input.  [default: a shipped novel]")
@_list_flag(
    "-p",
    "--n-prompt",
    "n_prompt",
    default="512",
    text="Prompt tokens to time; 0: none. The text itself is --prompt.",
)
@_list_flag("-n", "--n-gen", "n_gen", default="128", text="Decoded tokens to time; 0: none.")
@_list_flag("-d", "--n-depth", "n_depth", default="0", text="Tokens of text before the timed ones.")
@click.option(
    "--warm-up",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Tokens that each run first decodes untimed, with which --gamma auto and --method auto measure.",
)
@_list_flag("--batch", default="1", text="Sequences that decode together, each after -d tokens.")
@click.option("--ragged", is_flag=True, help="The sequences of a batch of N have 1/N, 2/N, ... of the -d tokens.")
@_list_flag("-g", "--gamma", "gamma", default="auto", text="Drafted tokens per round, or auto.")
@_list_flag(
    "--draft-pages",
    default="all",
    text=f"Pages a draft reads per KV head, all or auto. For all, window and snapkv read {METHODS['window'].pages}, and "
    "method auto chooses.",
)
@draft_precision_flag
@page_choice_flag
@draft_model_flag()
@draft_model_kv_flag
@draft_refresh_flag
@choice_flag("--accept", ACCEPTANCE, text="Acceptance rule: same text as ar, or same distribution.")
@_list_flag(
    "--methods",
    "--method",
    "methods",
    default="ar-fp16,ar-int8,ar-int4,quantspec",
    text="Methods, each alone or with the target's view of the cache: METHOD-int8 (the same as METHOD), METHOD-fp16 "
    "or METHOD-int4.",
)
@choice_flag("--weights", WEIGHTS, text="The target's weights.")
@choice_flag("--kv-rounding", KV_ROUNDINGS, text="Rounding of keys and values.")
@_list_flag("--rows", default="1,5,8", text="With kernels: rows of a step.")
@click.option("-r", "--repetitions", type=int, default=5, show_default=True, metavar="N", help="Runs of each test.")
@click.option("-s", "--seed", type=int, default=0, show_default=True, help="Seed of the first repetition.")
@device_flags
@click.option(
    *("-o", "--output-format", "output_format"),
    type=click.Choice(("md", "csv", "json", "jsonl")),
    default="md",
    show_default=True,
    help="Table for people, or rows for programs; jsonl has one object per line. A file is --output.",
)
@output_flag("--output", text="Write to this file instead of stdout; the document of --json still goes to stdout.")
@report_flag
@click.option(
    "--compare",
    nargs=2,
    metavar="A B",
    allow_from_autoenv=False,
    help="Measure nothing, and compare the rows of two files that bench wrote, with their noise.",
)
@json_flag
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    *,
    what: str | None,
    rows: str,
    device: str,
    threads: int | None,
    draft_precision: str,
    accept: str,
    kv_rounding: str,
    compare: tuple[str, str] | None,
    weights: str,
    **flags: Any,
) -> Done:
    """Measure prefill and decoding at depth, and the memory bandwidth that bounds them.

    bench kernels times each kernel of a GPU at the model's shapes, and compares it with the bytes it must move.

    \b
    Lists are llama-bench's: 0,512 or 0-4096+1024 or 1-64*2. For example:
      quantspec bench -m DIR -p 512 -n 128 -d 0,4096,16384 -r 3
    """
    from . import bench as measure
    from .bench.grid import Arguments

    options = EngineOptions(
        device=device,
        threads=threads,
        weights=weights,
        draft_precision=draft_precision,
        accept=accept,
        kv_rounding=kv_rounding,
    )
    _refuse_unused(ctx, what)
    if flags["as_json"]:
        _refuse_two_forms(ctx, flags["output_format"])
    if compare is not None:
        from .compare import compare as side_by_side

        form = flags["output_format"]
        return side_by_side(*compare, output_format=form, place=flags["output"], as_json=flags["as_json"])
    arguments = Arguments(**flags)
    if what is None:
        return measure.bench(arguments, options)
    asked = ctx.get_parameter_source("n_depth") is not ParameterSource.DEFAULT
    return measure.kernels(arguments, options, rows, depths=arguments.n_depth if asked else None)


@cli.command(
    "eval", context_settings=_CONTEXT, epilog=_EXIT_CODES, short_help="Score a text: views of the cache, and drafts."
)
@model_flags
@file_flag("-p", "--prompt", "prompt", text="Text to score, - for standard input.  [default: a shipped sample]")
@click.option("--tokens", type=int, metavar="N", help="Score the first N tokens of the text.  [default: all]")
@click.option(
    "--context",
    type=int,
    default=0,
    metavar="N",
    help="Process the first N tokens as a prompt. They and the next token are not scored.",
)
# For `run` a variable or a key of this name has another meaning, and values such as "auto".
@click.option(
    "--draft-pages",
    cls=Lists,
    metavar="LIST",
    allow_from_autoenv=False,
    help="Compare ways to choose this many pages for a draft: best, snap, window, and single tokens.",
)
@click.option(
    "--decode",
    type=int,
    metavar="N",
    help="Also decode N tokens with every drafting method but auto, and report tokens per round by gamma, 1 to 8.",
)
@click.option(
    "--depths",
    cls=Lists,
    metavar="LIST",
    help="With --decode: tokens of the text before them.  [default: --context]",
)
@draft_model_flag("With --decode: also drafts of this checkpoint, which has the same tokenizer.")
@draft_model_kv_flag
@choice_flag("--weights", WEIGHTS[:3], text="Weights to score. int8 and int4 are also compared with the checkpoint's.")
@choice_flag(
    "--kv-rounding",
    (*KV_ROUNDINGS, TRUNCATE),
    text="Rounding of keys and values. truncate is an ablation: drafts read the least code of 16, not the centre (CPU).",
)
@click.option("--k-axis", type=click.Choice(AXES), help="Quantise keys along this axis (CPU).  [default: channel]")
@click.option("--v-axis", type=click.Choice(AXES), help="Quantise values along this axis (CPU).  [default: token]")
@click.option(
    "--group",
    type=click.Choice(GROUPS),
    help="Elements of the cache that share a scale, at most (CPU).  [default: 128]",
)
@draft_precision_flag
@click.option(
    "--sensitivity",
    is_flag=True,
    help="Also score the default draft with each kind of matrix in 8 bits, and the gain per added byte.",
)
@click.option(
    "--sensitivity-layers",
    is_flag=True,
    help="As --sensitivity, and with each matrix of each layer alone in the target's precision (CPU; slow).",
)
@output_flag("-o", "--output", "output", text="Write the scores to this file instead of stdout.")
@report_flag
@device_flags
@json_flag
def evaluate(
    *,
    device: str,
    threads: int | None,
    weights: str,
    kv_rounding: str,
    draft_precision: str,
    k_axis: str | None,
    v_axis: str | None,
    group: str | None,
    **flags: Any,
) -> Done:
    """Score a text: perplexity and divergence of each view of the cache, acceptance of each draft."""
    from .eval import Ablation, Arguments
    from .eval import evaluate as execute

    ablation = Ablation.of(k_axis, v_axis, group, truncated=kv_rounding == TRUNCATE)
    rounding = KV_ROUNDINGS[0] if kv_rounding == TRUNCATE else kv_rounding
    options = EngineOptions(
        device=device, threads=threads, weights=weights, kv_rounding=rounding, draft_precision=draft_precision
    )
    return execute(Arguments(ablation=ablation, **flags), options)


for _command in (cli, *cli.commands.values()):
    _complete_files(_command)
