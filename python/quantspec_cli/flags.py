"""Flags of the command line that several commands share, and their types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from . import settings
from .errors import UsageError
from .options import (
    ACCEPTANCE,
    COMBINED,
    DRAFT_WEIGHTS,
    GAMMA_MAX,
    KV_ROUNDINGS,
    KV_TARGETS,
    MAX_NEW_TOKENS,
    MAX_REPLY_TOKENS,
    MAX_THOUGHTFUL_TOKENS,
    METHODS,
    PAGE_CHOICES,
    SENSITIVE,
    WEIGHTS,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class NumberOr(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since click 8.4
    """An integer or one of some words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.name = "|".join(("N", *words))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number, or the word itself."""
        if value in self.words or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        try:
            return int(str(value))
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor {' or '.join(map(repr, self.words))}", param, ctx)


class Verbatim(click.types.StringParamType):
    """Text of a repeatable flag; its variable holds one text, including white space."""

    def split_envvar_value(self, rv: str) -> list[str]:
        """The variable's single text; click would split it at spaces."""
        return [rv]


class Lists(click.Option):
    """A comma-separated list. click uses the last of several silently; here they are joined."""

    def add_to_parser(self, parser: Any, _ctx: click.Context) -> None:
        """Makes the parser keep every occurrence."""
        parser.add_option(obj=self, opts=self.opts, dest=self.name, action="append", nargs=1)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """All lists joined; a variable or a setting is one list."""
        value, source = super().consume_value(ctx, opts)
        return (",".join(value) if source is ParameterSource.COMMANDLINE else value), source


Command = TypeVar("Command", bound="Callable[..., Any]")


def _flags(*flags: Callable[[Command], Command]) -> Callable[[Command], Command]:
    def apply(command: Command) -> Command:
        for flag in reversed(flags):
            command = flag(command)
        return command

    return apply


def choice_flag(flag: str, choices: Sequence[str], *, text: str) -> Callable[[Command], Command]:
    """A flag with fixed choices; the first is the default."""
    return click.option(flag, type=click.Choice(choices), default=choices[0], show_default=True, help=text)


def _once(_ctx: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> str | None:
    """The one name given for a flag. click alone would silently use the last of several."""
    if len(names) > 1:
        flag = settings.flag_of(parameter)
        raise UsageError(f"{flag} is given {len(names)} times", f"give {flag} once")
    return names[0] if names else None


def _written(ctx: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> str | None:
    """The one name of a file that is replaced."""
    name = _once(ctx, parameter, names)
    if name is not None and settings.is_in_use(name, ctx):
        raise UsageError(f"{settings.flag_of(parameter)} {name} is the settings file", "name another file")
    return name


def _unless_stdout(ctx: click.Context, parameter: click.Parameter, names: tuple[str, ...]) -> str | None:
    """`--output -` is standard output, as `--prompt -` is standard input; so is /dev/stdout."""
    from .output import descriptor

    name = _written(ctx, parameter, names)
    return None if name == "-" or (name is not None and descriptor(name) == 1) else name


def file_flag(*flags: str, text: str, callback: Callable[..., str | None] = _once) -> Callable[[Command], Command]:
    """A flag for one file, of this invocation only."""
    return click.option(*flags, multiple=True, metavar="FILE", callback=callback, allow_from_autoenv=False, help=text)


def output_flag(*flags: str, text: str) -> Callable[[Command], Command]:
    """--output: a file, or standard output."""
    return file_flag(*flags, text=text, callback=_unless_stdout)


def model_flags(command: Command) -> Command:
    """--model, --revision, --offline."""
    return _flags(
        click.option(
            "-m",
            "--model",
            metavar="DIR|FILE|HUB_ID",
            help="Model directory, GGUF file or hub id.  [default: demo, the embedded model]",
        ),
        click.option("--revision", metavar="REV", help="Branch, tag or commit on the hub (or HUB_ID@REV)."),
        click.option("--offline", is_flag=True, help="Use the download cache only (also HF_HUB_OFFLINE=1)."),
    )(command)


def device_flags(command: Command) -> Command:
    """--device, --threads."""
    return _flags(
        click.option(
            "--device", metavar="DEVICE", default="auto", show_default=True, help="auto, cpu, cuda or cuda:N."
        ),
        click.option("-t", "--threads", type=int, metavar="N", help="CPU workers.  [default: all processors]"),
    )(command)


def page_choice_flag(command: Command) -> Command:
    """--page-choice."""
    return click.option(
        "--page-choice",
        type=click.Choice(PAGE_CHOICES),
        default=None,
        help="With --draft-pages N or auto: the best-scoring pages, or the first and the newest.  [default: best]",
    )(command)


def draft_precision_flag(command: Command) -> Command:
    """--draft-precision."""
    return click.option(
        "--draft-precision",
        cls=Lists,
        metavar="auto|none|KINDS",
        default="auto",
        show_default=True,
        help=f"Matrices that a draft reads in 8 bits: a comma list of {', '.join(SENSITIVE)}; auto is down on a CPU if "
        "that adds at most 5 % to the bytes of a draft step, else none.",
    )(command)


def draft_model_flag(
    text: str = "For methods draft-model and auto: the checkpoint that drafts, with the same tokenizer.",
) -> Callable[[Command], Command]:
    """--draft-model, with its help."""
    return click.option("--draft-model", metavar="DIR|FILE|HUB_ID", help=text)


def draft_model_kv_flag(command: Command) -> Command:
    """--draft-model-kv."""
    return click.option(
        "--draft-model-kv",
        type=click.Choice(KV_TARGETS),
        default=None,
        help="View of the draft model's own cache.  [default: the target's]",
    )(command)


def draft_refresh_flag(command: Command) -> Command:
    """--draft-refresh."""
    return click.option(
        "--draft-refresh",
        type=int,
        metavar="N",
        default=0,
        show_default=True,
        help="For method snapkv: choose pages again after N new ones; 0: never.",
    )(command)


def engine_flags(command: Command) -> Command:
    """Everything of `EngineOptions` but the device."""

    about = "; ".join(f"{name}: {method.about}" for name, method in METHODS.items() if name not in COMBINED)
    return _flags(
        click.option(
            *("--method", "--spec-type", "method"),
            type=click.Choice(tuple(METHODS)),
            metavar="METHOD",
            default="quantspec",
            show_default=True,
            help=f"What drafts. {about}. METHOD+ngram also copies earlier text where copies have proved reliable.",
        ),
        click.option(
            *("--gamma", "--draft-max", "--num-draft-tokens", "gamma"),
            type=NumberOr("auto"),
            metavar="N|auto",
            default="auto",
            show_default=True,
            help=f"Drafted tokens per round, 0 to {GAMMA_MAX}; auto chooses by measured cost and acceptance.",
        ),
        choice_flag(
            "--weights",
            WEIGHTS,
            text="The target's weights, which define the output. checkpoint: as in the file; int8: half the memory, drafts "
            "read the upper nibbles; int4: mostly the upper nibbles alone; auto: int8 if the checkpoint's do not fit.",
        ),
        choice_flag("--kv-target", KV_TARGETS, text="View of the cache that defines the output."),
        choice_flag(
            "--kv-rounding", KV_ROUNDINGS, text="Rounding of keys and values; paper is that of the QuantSpec paper."
        ),
        choice_flag(
            "--draft-weights", DRAFT_WEIGHTS, text="Weights that a draft reads in 4 bits: all, the MLP's, or none."
        ),
        draft_precision_flag,
        click.option(
            "--draft-pages",
            type=NumberOr("all", "auto"),
            metavar="N|all|auto",
            default=None,
            help="Pages of 128 tokens that a draft reads per KV head; auto chooses the number together with gamma.  "
            f"[default: {METHODS['window'].pages} with window and snapkv; auto with auto, and with quantspec and kv4 "
            "if gamma is auto; else all]",
        ),
        page_choice_flag,
        draft_refresh_flag,
        draft_model_flag(),
        draft_model_kv_flag,
        choice_flag(
            "--accept", ACCEPTANCE, text="Acceptance rule when sampling: same text as ar, or same distribution."
        ),
    )(command)


def sampling_flags(command: Command) -> Command:
    """All flags of `GenerateOptions` except the stop strings."""
    return _flags(
        click.option(
            *("-n", "--max-tokens", "--max-new-tokens", "--n-predict", "max_tokens"),
            type=int,
            metavar="N",
            default=MAX_NEW_TOKENS,
            help=f"Maximum number of new tokens.  [default: {MAX_NEW_TOKENS}; {MAX_REPLY_TOKENS} with a chat template, "
            f"{MAX_THOUGHTFUL_TOKENS} if the model may think first; less near the end of the context]",
        ),
        click.option(
            *("--temperature", "--temp", "temperature"),
            type=float,
            default=0.0,
            help="0 is greedy.  [default: 0. With a chat template, generation_config.json sets this and the next three]",
        ),
        click.option("--top-k", type=int, default=0, help="Keep the K most likely tokens; 0 is off.  [default: 0]"),
        click.option(
            "--top-p",
            type=float,
            default=1.0,
            help="Keep the most likely tokens of total probability P; 1 is off.  [default: 1]",
        ),
        click.option(
            "--min-p",
            type=float,
            default=0.0,
            help="Drop tokens less likely than P times the most likely one.  [default: 0]",
        ),
        click.option(
            *("--repetition-penalty", "--repeat-penalty", "repetition_penalty"),
            type=float,
            default=1.0,
            help="Divide positive logits of tokens in prompt or answer by this, multiply negative ones; 1 is off.  "
            "[default: 1; with a chat template, from generation_config.json, or 1.05 for small models]",
        ),
        click.option(
            "--frequency-penalty",
            type=float,
            default=0.0,
            help="Subtract this from a token's logit per occurrence in the answer.  [default: 0; with a chat template, "
            "0.6 for small models]",
        ),
        click.option(
            "--presence-penalty",
            type=float,
            default=0.0,
            help="Subtract this once from the logits of tokens in the answer.  [default: 0]",
        ),
        click.option(
            *("--no-repeat-ngram", "--no-repeat-ngram-size", "no_repeat_ngram"),
            type=int,
            metavar="N",
            default=0,
            help="Forbid tokens that would repeat N tokens of prompt or answer; 0 is off.  "
            "[default: 0; with a chat template, from generation_config.json]",
        ),
        click.option(
            "-s",
            "--seed",
            type=int,
            default=0,
            show_default=True,
            help="Same seed, same text. With --accept rejection only if gamma, pages and method are fixed.",
        ),
        click.option("--ignore-eos", is_flag=True, help="Continue after an end-of-text token."),
        click.option(
            "--json-schema",
            metavar="FILE",
            help="Answer with JSON that this schema allows; all other tokens are masked.",
        ),
    )(command)


def chat_flags(command: Command) -> Command:
    """--thinking, --template-arg."""
    return _flags(
        click.option(
            "--thinking",
            type=click.Choice(("on", "off")),
            help="Whether the model thinks before it answers. Its thoughts are not part of the answer.  [default: off]",
        ),
        click.option(
            "--template-arg",
            multiple=True,
            type=Verbatim(),
            metavar="KEY=VALUE",
            help="A variable of the chat template: VALUE is JSON if valid, else text. Repeatable.",
        ),
    )(command)


def json_flag(command: Command) -> Command:
    """--json."""
    text = "Print one JSON document to stdout and nothing else."
    return click.option("--json", "as_json", is_flag=True, allow_from_autoenv=False, help=text)(command)


report_flag = file_flag(
    "--report", text="Also write a page of charts: one self-contained HTML file.", callback=_written
)

stop_flag = click.option(
    "--stop",
    multiple=True,
    type=Verbatim(),
    metavar="TEXT",
    help="End before this text, even inside a token. Repeatable.",
)


def prompt_cache_flag(
    text: str = "Keep processed prompts in this folder: a second question about a document skips its prefill.",
) -> Callable[[Command], Command]:
    """--prompt-cache, with its help."""

    def expanded(_ctx: click.Context, _parameter: click.Parameter, folder: str | None) -> str | None:
        return folder and settings.expanded(folder)

    return click.option("--prompt-cache", metavar="DIR", callback=expanded, help=text)
