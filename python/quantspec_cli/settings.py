"""Defaults for flags: QUANTSPEC_* variables, then a TOML file.

    model = "meta-llama/Llama-3.2-1B"   # for every command that has --model

    [run]
    max-tokens = 500

Keys are long flags without the dashes. The file is --config, $QUANTSPEC_CONFIG, or quantspec/config.toml in
$XDG_CONFIG_HOME (default ~/.config).
"""

from __future__ import annotations

import os
import sys
from collections import ChainMap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from . import files, hub
from .errors import FileError, IgnoredError, QuantspecError, UsageError, reason
from .options import THREADS_MAX, shown, whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PREFIX = "QUANTSPEC"

# Smaller draft weights are made in less than half a second on two processors (docs/draft_weights.md).
SMALLEST_DRAFTS_BYTES = 64 << 20

# No setting is larger than a seed. TOML numbers are unbounded, and printing or converting huge ones is unsafe.
_LARGEST = 2**64 - 1

# Parameters of a single invocation, which cannot have defaults.
_NO_SETTING = {
    "clear",
    "documents",
    "dry_run",
    "paths",
    "out",
    "prompt",
    "text",
    "output",
    "report",
    "compare",
    "as_json",
    "help",
    "what",
}


def default_path() -> Path:
    """The settings file if none is named."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(expanded(home)) / "quantspec" / "config.toml"


def expanded(path: str) -> str:
    """A path with the home directory for "~", which no shell replaces in a variable or in the settings file."""
    # Not Path.expanduser: it raises for an unknown user, or if no home directory is known.
    return os.path.expanduser(path)  # noqa: PTH111


def draft_cache() -> Path | None:
    """The folder of draft weights: $QUANTSPEC_DRAFT_CACHE, or a folder of Hugging Face's cache for other programs (HF_HOME,
    HF_ASSETS_CACHE). None if the variable is "off", or if no home directory is known.
    """
    wanted = os.environ.get("QUANTSPEC_DRAFT_CACHE")
    if wanted == "off":
        return None
    if wanted:
        return Path(expanded(wanted))
    folder = Path(hub.hub_settings().HF_ASSETS_CACHE) / "quantspec" / "drafts"
    return None if folder.parts[0] == "~" else folder


def native_draft_cache() -> tuple[str, int] | None:
    """`draft_cache` in the native module's form."""
    folder = draft_cache()
    return None if folder is None else (str(folder), SMALLEST_DRAFTS_BYTES)


def threads() -> int | None:
    """$QUANTSPEC_THREADS, for callers without a command line; None if it is not set."""
    given = os.environ.get("QUANTSPEC_THREADS")
    if not given:
        return None
    try:
        number = int(given)
    except ValueError:
        raise UsageError(f"QUANTSPEC_THREADS is {given!r:.60}", f"use a whole number, 1 to {THREADS_MAX}") from None
    whole("QUANTSPEC_THREADS", number, 1, THREADS_MAX)
    return number


def default_map(file: str | None, commands: Mapping[str, click.Command]) -> dict[str, Any]:
    """The file as click's default map: command name to parameter name to value. Empty without a file. The first map of a
    command has the keys of its table, the second those at the top.
    """
    if file == "":
        raise UsageError("the name of the settings file is empty", "name a file after --config, or leave it out")
    path = _path(file)
    if file is None and not files.is_file(path):
        return {}
    table = _read(path)
    sections = {name: table.pop(name) for name in list(table) if name in commands and isinstance(table[name], dict)}
    known = {name: _settable(command) for name, command in commands.items()}
    defaults: dict[str, Any] = {name: ChainMap({}, {}) for name in commands}
    _refuse_twice(path, "", table)
    for key, value in table.items():
        users = [name for name in commands if _shared(known[name].get(_parameter(key)))]
        if not users or isinstance(value, dict):
            raise _unknown(path, key, set().union(*map(set, known.values())) | set(commands))
        for name in users:
            defaults[name].maps[1][_parameter(key)] = _checked(path, key, value, known[name][_parameter(key)])
    for name, section in sections.items():
        _refuse_twice(path, f"{name}.", section)
        for key, value in section.items():
            if _parameter(key) not in known[name] or isinstance(value, dict):
                raise _unknown(path, f"{name}.{key}", known[name])
            defaults[name][_parameter(key)] = _checked(path, f"{name}.{key}", value, known[name][_parameter(key)])
    return defaults


def _path(file: str | None) -> Path:
    return default_path() if file is None else Path(file)


def is_in_use(path: str, ctx: click.Context) -> bool:
    """True if the path is that of the settings file. A device may be the settings file and be written, such as /dev/null."""
    used = _path(ctx.find_root().params.get("config"))
    return files.is_file(used) and os.path.realpath(path) == os.path.realpath(used)


def origin(ctx: click.Context, parameter: click.Parameter, what: str = "it") -> str:
    """The start of a hint: the source of a value, `what`, that is not from the command line."""
    name = parameter.name or ""
    match ctx.get_parameter_source(name):
        case ParameterSource.ENVIRONMENT:
            return f"{what} is from {parameter.envvar or f'{ctx.auto_envvar_prefix}_{name.upper()}'}; "
        case ParameterSource.DEFAULT_MAP:
            in_table = isinstance(ctx.default_map, ChainMap) and name in ctx.default_map.maps[0]
            key = f"{ctx.info_name}." * in_table + name.replace("_", "-")
            return f"{what} is from {key} in {_path(ctx.find_root().params['config'])}; "
        case _:
            return ""


def left_out(error: IgnoredError, ctx: click.Context) -> bool:
    """Gives an option without effect its default, unless a flag set it: a variable or a setting may be meant for other
    commands and methods. False if a flag set it.
    """
    for parameter in ctx.command.params:
        name = parameter.name or ""
        given = ctx.get_parameter_source(name) in {ParameterSource.ENVIRONMENT, ParameterSource.DEFAULT_MAP}
        if name == error.option and given:
            ctx.params[name] = parameter.to_info_dict()["default"]
            ctx.set_parameter_source(name, ParameterSource.DEFAULT)
            return True
    return False


def locate(error: QuantspecError, ctx: click.Context) -> None:
    """Completes an error about an option with the flag's name and the value's source."""
    for parameter in ctx.command.params:
        if error.option not in {parameter.name, *parameter.opts, *map(_keyword, parameter.opts)}:
            continue
        called = f"{error.option} is "
        if error.option not in parameter.opts and error.message.startswith(called):
            error.message = f"{flag_of(parameter)} is {error.message.removeprefix(called)}"
        error.hint = origin(ctx, parameter) + error.hint


def flag_of(parameter: click.Parameter) -> str:
    """A parameter's name on the command line: its first long flag."""
    return next((name for name in parameter.opts if name.startswith("--")), parameter.opts[0])


def _keyword(option: str) -> str:
    return _parameter(option.lstrip("-"))


def _read(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(
            f"settings file {path} cannot be read: {reason(error)}", "correct --config or QUANTSPEC_CONFIG, or the file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"settings file {path} is not valid TOML: {error}", "correct the file") from error
    return table


def _settable(command: click.Command) -> dict[str, click.Parameter]:
    return {name: parameter for parameter in command.params if (name := parameter.name) and name not in _NO_SETTING}


def _shared(parameter: click.Parameter | None) -> bool:
    """Whether a variable or a key at the top sets this parameter. It may have another meaning in another command."""
    return isinstance(parameter, click.Option) and parameter.allow_from_autoenv


def _checked(path: Path, key: str, value: object, parameter: click.Parameter) -> object:
    """A value of the file in the form of the flag: text, a number, true or false; a list if the flag may be repeated."""
    if parameter.multiple:
        items = value if isinstance(value, list) else [value]
        for item in items:
            if not isinstance(item, str):
                raise UsageError(f"settings file {path}: {key} is {shown(item)}", "give a text, or a list of texts")
        return items
    return _checked_one(path, key, value, parameter)


def _checked_one(path: Path, key: str, value: object, parameter: click.Parameter) -> object:
    is_flag = bool(getattr(parameter, "is_flag", False))
    if isinstance(value, int) and abs(value) > _LARGEST:
        raise UsageError(f"settings file {path}: {key} is a number of {value.bit_length()} bits", "give a smaller one")
    if isinstance(value, bool) != is_flag or not isinstance(value, str | int | float):
        wanted = "true or false" if is_flag else "a text or a number"
        raise UsageError(f"settings file {path}: {key} is {shown(value)}", f"give {wanted}")
    # As a flag 2.9 is refused; click would silently truncate a number from the file to 2.
    if isinstance(value, float) and isinstance(parameter.type, click.types.IntParamType):
        raise UsageError(f"settings file {path}: {key} is {shown(value)}", "give a whole number")
    return value


def _parameter(key: str) -> str:
    return key.replace("-", "_")


def _refuse_twice(path: Path, section: str, table: Mapping[str, Any]) -> None:
    keys: dict[str, str] = {}
    for key in table:
        other = keys.setdefault(_parameter(key), key)
        if other != key:
            raise UsageError(
                f"settings file {path}: {section}{other} and {section}{key} are one setting", "leave out one of them"
            )


def _unknown(path: Path, key: str, known: Iterable[str]) -> UsageError:
    names = ", ".join(sorted(name.replace("_", "-") for name in known))
    return UsageError(
        f"settings file {path}: {key} is no setting",
        f"known are {names}" if names else "remove it: this command has no settings",
    )
