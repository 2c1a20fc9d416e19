"""The command line: flags, and nothing else. Each command parses, calls its module and returns an exit code.

Modules that load the engine, a tokenizer or rich are imported inside the commands: `--help` is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from . import __version__, settings
from .options import (
    EngineOptions,
    GenerateOptions,
    device_flags,
    engine_flags,
    json_flag,
    model_flags,
    sampling_flags,
)

# QUANTSPEC_GAMMA and the like mean the same for every command.
_CONTEXT = {"auto_envvar_prefix": settings.PREFIX, "help_option_names": ["-h", "--help"], "max_content_width": 100}

_EXIT_CODES = """\b
Exit codes: 0 done, 1 error, 2 usage, 3 does not fit in memory or context
(nothing was cut), 4 some documents of a batch failed, 130 interrupted,
141 standard output was closed."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@click.version_option(__version__, prog_name="quantspec")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="QUANTSPEC_CONFIG",
    help="Settings file (TOML).  [default: ~/.config/quantspec/config.toml]",
)
@click.pass_context
def cli(ctx: click.Context, config: Path | None) -> None:
    """Decode long documents faster without changing a token.

    A Llama-family model drafts for itself with 4-bit weights and a 4-bit view of its cache, and verifies with full
    weights over the 8-bit view. Flags override QUANTSPEC_* variables (QUANTSPEC_MODEL, ...), which override the
    settings file.
    """
    ctx.default_map = settings.default_map(config, cli.commands)


@cli.command(context_settings=_CONTEXT, epilog=_EXIT_CODES)
@model_flags
@click.option(
    *("-p", "--prompt", "prompt"),
    multiple=True,
    metavar="FILE",
    allow_from_autoenv=False,
    help="Text file to continue, - for standard input. Several decode together.",
)
@click.option("--text", multiple=True, allow_from_autoenv=False, help="Literal text instead of a file.")
@click.option("--instruction", metavar="TEXT", help="What to do with the document; uses the model's chat template.")
@click.option("--system-prompt", metavar="TEXT", help="System prompt; uses the model's chat template.")
@click.option(
    *("-o", "--output", "output"),
    metavar="FILE",
    allow_from_autoenv=False,
    help="Write the answer there instead of stdout; the file appears when it is complete.",
)
@click.option("-c", "--ctx-size", type=int, default=0, metavar="N", help="Context in tokens.  [default: the model's]")
@sampling_flags
@click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. Repeatable.")
@engine_flags
@device_flags
@json_flag
@click.option("-q", "--quiet", is_flag=True, help="No statistics.")
def run(
    prompt: tuple[str, ...],
    text: tuple[str, ...],
    output: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    **flags: Any,
) -> int:
    """Continue documents: text to stdout, statistics to stderr."""
    sampling = {name: flags.pop(name) for name in ("temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")}
    generate_options = GenerateOptions(max_new_tokens=max_tokens, stop=stop, **sampling)
    engine_options = EngineOptions(**{name: flags.pop(name) for name in EngineOptions.__dataclass_fields__})

    from .run import Request
    from .run import run as execute

    return execute(Request(prompts=prompt, texts=text, output=output, **flags), engine_options, generate_options)


@cli.command(context_settings=_CONTEXT)
@json_flag
def doctor(as_json: bool) -> int:
    """Show what this machine offers: processor, GPU or why not, memory, model cache, versions."""
    from .doctor import doctor as execute

    return execute(as_json=as_json)


@cli.command(context_settings=_CONTEXT)
@model_flags
@device_flags
@json_flag
def selftest(*, device: str, threads: int | None, **flags: Any) -> int:
    """Prove on this machine that speculation changes no token. Exit code 1 at the first difference."""
    from .selftest import selftest as execute

    options = EngineOptions(device=device, threads=threads)
    return execute(options=options, **flags)
