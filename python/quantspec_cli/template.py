"""Chat templates: a document, an instruction and a system prompt in the message format a model was trained on.

A template is a program that comes with the model. It runs in jinja's sandbox, in a separate process with limits on time
and memory, so that one that loops, grows or raises ends in an error.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import datetime
from subprocess import DEVNULL, PIPE
from typing import IO, TYPE_CHECKING, Any, cast

from . import background, files
from .errors import ModelError, UsageError, internal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jinja2.ext import Extension

# Real templates take milliseconds. The wall-clock limit is longer, as a busy machine may start Python slowly.
CPU_LIMIT_S = 5
WALL_LIMIT_S = 30
# Address space of the process, in addition to the document's needs: jinja with its imports takes about 100 MB.
MEMORY_LIMIT_BYTES = 1 << 30
# The template variable that turns thinking on or off.
THINKING = "enable_thinking"
# Variables that every conversation sets.
RESERVED = ("messages", "add_generation_prompt")
# Most variables that a hint lists.
NAMED = 12
# Most characters a template may add to its messages; real ones add a few special tokens.
SLACK_CHARACTERS = 1 << 20
# Most characters of a template's error that are shown.
ERROR_CHARACTERS = 300

_CHILD = "import sys, json; sys.path[:] = json.loads(sys.argv[1]); from quantspec_cli.template import child; child()"


def find(directory: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template of a checkpoint: chat_template.jinja, or that of tokenizer_config.json or of chat_template.json (the
    default if there are several). Models with a vision tower may have it in the last file alone.
    """
    # Not at the top of the module: the process that renders needs neither.
    from .options import shown
    from .tokenizer import read_json

    file = directory / "chat_template.jinja"
    if files.is_file(file):
        try:
            return files.read(file).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{file} cannot be read: {error}", "use the file published with these weights") from error
    found = config.get("chat_template")
    if found is None:
        found = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        entries = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = entries[-1].get("template") if entries else None
    if not isinstance(found, str | None):
        raise ModelError(
            f"the chat_template of {directory} is {shown(found):.60}, and no text",
            "use the file published with these weights",
        )
    return found


def messages(document: str, instruction: str | None, system_prompt: str | None) -> list[dict[str, str]]:
    """A document as a conversation. The instruction follows the document, so the model reads it with the text in mind."""
    user = document if instruction is None else f"{document}\n\n{instruction}"
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": user}]


def plain(document: str, instruction: str | None, system_prompt: str | None) -> str:
    """The same for base models, without a template."""
    parts = [system_prompt, document, instruction]
    return "\n\n".join(part for part in parts if part is not None) + "\n\n"


@dataclass(frozen=True)
class Rendered:
    """A conversation in the model's format.

    Attributes:
        text: the conversation and the start of the answer, including special tokens.
        variables: names that the template reads.
    """

    text: str
    variables: frozenset[str]


def render(
    template: str,
    conversation: Sequence[Mapping[str, str]],
    special: Mapping[str, str],
    arguments: Mapping[str, Any] | None = None,
) -> Rendered:
    """Renders a conversation and the start of the answer.

    `special` are the texts of the model's special tokens. `arguments` are further variables of the template; one that it
    does not read is refused. `enable_thinking` is false unless an argument sets it.
    """
    if template.strip() and "{" not in template:
        # GGUF files made from Mistral's own format may name a template of llama.cpp instead of holding it.
        raise _refused(f"the model's chat template is only a name, {template!r:.60}")
    size = sum(len(message["content"]) for message in conversation) + len(json.dumps(arguments))
    request = {
        "template": template,
        "messages": list(conversation),
        "special": dict(special),
        "arguments": dict(arguments or {}),
        "limit": 2 * size + SLACK_CHARACTERS,
        "cpu_limit_s": CPU_LIMIT_S,
    }
    written = _answer_of_child(json.dumps(request).encode())
    try:
        answer: dict[str, Any] = json.loads(written)
    except ValueError:
        # A limit killed the process before its answer.
        raise _refused(f"the chat template took more than {CPU_LIMIT_S} s or too much memory") from None
    if "error" in answer:
        # A template may raise a text of any length, such as the document.
        unset = [name for name in answer.get("unset", ()) if name not in {*RESERVED, *special}]
        named = f" (not set: {', '.join(unset[:NAMED])})" if unset else ""
        raise ModelError(
            f"the chat template failed: {answer['error']:.{ERROR_CHARACTERS}}",
            f"adapt system prompt, messages or template arguments{named} to it, or leave out --instruction and "
            "--system-prompt",
        )
    if "unknown" in answer:
        name, known = answer["unknown"], [name for name in answer["variables"] if name not in {*RESERVED, *special}]
        raise UsageError(
            f"the model's chat template has no variable {name}" + " to switch thinking" * (name == THINKING),
            f"leave it out; the template has {', '.join(known[:NAMED]) or 'no variables'}",
            option="thinking" if name == THINKING else "template_arg",
        )
    text = answer["text"]
    if not isinstance(text, str) or not text.strip():
        raise _refused("the chat template rendered nothing")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _refused(f"the chat template rendered half of a pair: character {error.start} is not UTF-8") from error
    return Rendered(text, frozenset(answer["variables"]))


class _Child:
    """The process that renders. It is kept for the next conversation, because starting one takes a tenth of a second."""

    turn = threading.RLock()
    _process: subprocess.Popen[bytes] | None = None

    @classmethod
    def running(cls) -> subprocess.Popen[bytes]:
        """The process; a new one if there is none, or if it was killed."""
        if cls._process is None or cls._process.poll() is not None:
            cls.end()
            # A program may have added a Path, which Python's imports ignore.
            places = [place for place in sys.path if isinstance(place, str)]
            command = [sys.executable, "-I", "-c", _CHILD, json.dumps(places)]
            try:
                cls._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
            except OSError as error:
                raise internal(error) from error
        return cls._process

    @classmethod
    def end(cls) -> None:
        """Ends the process."""
        process, cls._process = cls._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    cast("IO[bytes]", pipe).close()

    @classmethod
    def forget(cls) -> None:
        """In a fork: the process is the parent's, and a thread of the parent may hold the lock."""
        cls.turn, cls._process = threading.RLock(), None


atexit.register(_Child.end)
if hasattr(os, "register_at_fork"):  # Windows has no forks
    os.register_at_fork(after_in_child=_Child.forget)


def _answer_of_child(request: bytes) -> bytes:
    """The answer to one line; empty if a limit ended the process."""
    with _Child.turn:
        process, late = _Child.running(), threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(WALL_LIMIT_S, kill)
        answer = b""
        try:
            background.start(timer)
            answer = background.run(lambda: _exchanged(process, request))
        finally:
            timer.cancel()
            if not answer:
                _Child.end()
        if late.is_set():
            raise _refused(f"the chat template did not end within {WALL_LIMIT_S} s")
        return answer


def _exchanged(process: subprocess.Popen[bytes], request: bytes) -> bytes:
    stdin, stdout = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
    with contextlib.suppress(BrokenPipeError):
        stdin.write(request + b"\n")
        stdin.flush()
    return stdout.readline()


def _refused(message: str) -> ModelError:
    return ModelError(message, "leave out --instruction and --system-prompt to continue the document as plain text")


def child() -> None:
    """The process that renders: requests on standard input, answers on standard output, one a line."""
    # Ctrl-C in a terminal is for the parent, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        _limit(len(request["template"]) + request["limit"], request["cpu_limit_s"])
        try:
            answer = _render_here(
                **{name: request[name] for name in ("template", "messages", "special", "arguments", "limit")}
            )
        except MemoryError:
            answer = {"error": "out of memory"}
        except Exception as error:
            answer = {"error": str(error) or type(error).__name__}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _limit(characters: int, cpu_limit_s: int) -> None:
    """Sets the limits of the next conversation."""
    try:
        import resource
    except ImportError:  # Windows has no such limits; the wall-clock limit remains
        return

    def lower(kind: int, limit: int) -> None:
        # The parent may have set a lower hard limit, which cannot be raised.
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))

    # jinja, the parts of the text and their join: a few copies of at most 4 bytes per character.
    lower(resource.RLIMIT_AS, MEMORY_LIMIT_BYTES + 32 * characters)
    lower(resource.RLIMIT_CPU, math.ceil(time.process_time()) + cpu_limit_s)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _render_here(
    template: str, messages: list[dict[str, str]], special: dict[str, str], arguments: dict[str, Any], limit: int
) -> dict[str, Any]:
    from jinja2 import TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(
        value: object,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    variables = sorted(meta.find_undeclared_variables(environment.parse(template)))
    unknown = [name for name in arguments if name not in variables]
    if unknown:
        return {"unknown": unknown[0], "variables": variables}
    # Templates test `tools is not none`; transformers passes the variable, so it is passed here.
    context = {"add_generation_prompt": True, "tools": None, "documents": None, THINKING: False, **special, **arguments}
    pieces: list[str] = []
    length = 0
    try:
        for piece in environment.from_string(template).generate(messages=messages, **context):
            length += len(piece)
            if length > limit:
                raise TemplateError(f"it rendered more than {limit} characters")
            pieces.append(piece)
    except TemplateError as error:
        return {
            "error": str(error) or type(error).__name__,
            "unset": [name for name in variables if name not in context],
        }
    return {"text": "".join(pieces), "variables": variables}


def _generation_tag() -> type[Extension]:
    """`{% generation %}…{% endgeneration %}` marks the assistant's words for training; here it yields its content."""
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return Generation
