"""Conversations: checks the input of a chat template from Python and the command line, and renders it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import template
from .errors import UsageError
from .options import as_list, shown
from .prompts import check_utf8
from .text import Thinking

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .tokenizer import Tokenizer

ROLES = ("system", "user", "assistant")

# Tags around thinking blocks: of Qwen3, SmolLM3 and DeepSeek-R1, and of Magistral.
_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def checked(messages: object) -> list[dict[str, str]]:
    """The messages of a conversation, the last one the user's."""
    given = None if isinstance(messages, Mapping) else as_list(messages)
    if given is None:
        raise UsageError(f"messages is {shown(messages):.60}", 'give a list such as [{"role": "user", "content": "…"}]')
    turns = [_turn(f"message {number}", message) for number, message in enumerate(given, 1)]
    if not turns:
        raise UsageError("messages is empty", "give at least one message of the user")
    if turns[-1]["role"] != "user":
        raise UsageError(f"the last message has the role {turns[-1]['role']!r}", "end with a message of the user")
    return turns


def _turn(name: str, message: object) -> dict[str, str]:
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise UsageError(f"{name} is {shown(message):.60}", 'give {"role": …, "content": …} and nothing else')
    role, content = message["role"], message["content"]
    # The type comes first: an array compares its items.
    if not isinstance(role, str) or role not in ROLES:
        raise UsageError(f"{name} has the role {shown(role):.60}", f"use one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise UsageError(f"the content of {name} is {shown(content):.60}", "give a text")
    check_utf8(name, content)
    return {"role": role, "content": content}


def checked_arguments(arguments: object) -> dict[str, Any]:
    """Arguments of a chat template: names, and values as JSON has them."""
    if not isinstance(arguments, Mapping):
        raise UsageError(
            f"template_args is {shown(arguments):.60}", 'give a dictionary such as {"enable_thinking": True}'
        )
    for name, value in arguments.items():
        _check_name(name)
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            raise UsageError(
                f"template argument {name} is {shown(value):.60}",
                "give JSON values: texts, numbers, lists and objects",
            ) from None
        check_utf8(f"template argument {name}", text)
    return dict(arguments)


def parsed_arguments(thinking: str | None, pairs: Iterable[str]) -> dict[str, Any]:
    """Arguments of a chat template from `--thinking on|off` and from each KEY=VALUE of `--template-arg`."""
    arguments: dict[str, Any] = {} if thinking is None else {template.THINKING: thinking == "on"}
    for pair in pairs:
        check_utf8("a template argument", pair)
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f"template_arg is {pair!r:.60}", "give KEY=VALUE", option="template_arg")
        _check_name(name)
        if name in arguments:
            raise UsageError(f"template argument {name} is given twice", "give it once", option="template_arg")
        arguments[name] = _parsed(value)
    return arguments


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise UsageError(
            f"a template argument is called {shown(name):.60}", "use a name of the template", option="template_arg"
        )
    if name in template.RESERVED:
        raise UsageError(
            f"{name} cannot be a template argument", "leave it out: every conversation sets it", option="template_arg"
        )


def _parsed(value: str) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        return json.loads(value, parse_constant=refuse)
    except (ValueError, RecursionError):
        return value


def render(
    source: str, turns: Sequence[Mapping[str, str]], tokenizer: Tokenizer, arguments: Mapping[str, Any]
) -> tuple[list[str], Thinking | None]:
    """A conversation rendered for the model, in the parts that are encoded, and how its answer marks thinking (None: the
    model has no thinking blocks).
    """
    turns, mark = _marked(turns, tokenizer.control_tokens, source + json.dumps(arguments, ensure_ascii=False))
    rendered = template.render(source, turns, tokenizer.special, arguments)
    parts = rendered.text.split(mark) if mark else [rendered.text]
    switch = template.THINKING in rendered.variables
    written = [tags for tags in _TAGS if any(tag in source for tag in tags)]
    known = written or [tags for tags in _TAGS if any(tokenizer.id_of(tag) is not None for tag in tags)]
    if not (known or switch):
        return parts, None
    opens, closes = known[0] if known else _TAGS[0]
    begun = parts[-1].rstrip().endswith(opens)
    # Without a switch in the template, the model decides.
    on = not switch or arguments.get(template.THINKING, False) is not False
    return parts, Thinking(opens, closes, begun=begun, on=on, expected=bool(written or switch))


def _marked(
    turns: Sequence[Mapping[str, str]], tokens: Sequence[str], other: str
) -> tuple[Sequence[Mapping[str, str]], str]:
    """The turns, with a mark after the first character of each control token in texts of users, documents and system prompts.
    Also the mark, which `other` does not contain; "" if there is no such token. The text is encoded in the parts between
    marks, so these tokens are text, and a document cannot end its own turn.
    """
    contents = [turn["content"] for turn in turns if turn["role"] != "assistant"]
    # A model may have hundreds of control tokens, and most begin alike.
    begun = {start for start in {token[:2] for token in tokens} if any(start in content for content in contents)}
    likely = [token for token in tokens if len(token) > 1 and token[:2] in begun]
    found = {token for token in likely if any(token in content for content in contents)}
    if not found:
        return turns, ""
    used = set(other).union(*(turn["content"] for turn in turns))
    # Of an area for private use: a template passes it through.
    mark = next(mark for mark in map(chr, range(0x10FFFD, 0xDFFF, -1)) if mark not in used)
    begins = re.compile(f"(?=(?:{'|'.join(map(re.escape, found))}))(.)", re.DOTALL)

    def marked(turn: Mapping[str, str]) -> dict[str, str]:
        content = turn["content"]
        return {**turn, "content": content if turn["role"] == "assistant" else begins.sub(rf"\1{mark}", content)}

    return [marked(turn) for turn in turns], mark
