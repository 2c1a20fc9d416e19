"""Chat templates: their output, and that none can hang, exhaust memory or escape the sandbox."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, chat_model

from quantspec_cli import template
from quantspec_cli.errors import ModelError, UsageError

Run = Callable[..., Outcome]

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role\nnot supported') }}{% endif %}[INST] {{ m.content }} [/INST]{% endfor %}"
)


def render(source: str, document: str = "D", instruction: str | None = "I", system: str | None = None) -> str:
    return template.render(source, template.messages(document, instruction, system), {"bos_token": "<s>"}).text


def test_a_document_comes_before_its_instruction() -> None:
    assert render(CHATML, system="S") == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nD\n\nI<|im_end|>\n<|im_start|>assistant\n"
    )


def test_templates_have_the_environment_of_transformers() -> None:
    source = (
        "{% if tools is not none %}tools{% endif %}{% if documents %}documents{% endif %}"
        "{% generation %}{{ messages[0].content | tojson }}{% endgeneration %}"
        "{% for n in range(9) %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ bos_token }}\n  {% if true %}\n.{% endif %}"
    )
    assert render(source, "é<", None) == '"é<"014<s>\n.'


def test_tojson_has_the_arguments_of_transformers() -> None:
    value = {"b": [1, 2], "a": "é"}
    for arguments, text in (
        ("", '{"b": [1, 2], "a": "é"}'),
        ("(separators=(',', ':'))", '{"b":[1,2],"a":"é"}'),
        ("(sort_keys=true, ensure_ascii=true)", '{"a": "\\u00e9", "b": [1, 2]}'),
        ("(false, 1)", '{\n "b": [\n  1,\n  2\n ],\n "a": "é"\n}'),
    ):
        assert rendered("{{ value | tojson" + arguments + " }}", value=value) == text
    with pytest.raises(ModelError, match="unexpected keyword argument 'depth'"):
        rendered("{{ value | tojson(depth=1) }}", value=value)


def rendered(source: str, **arguments: Any) -> str:
    return template.render(source, template.messages("D", None, None), {}, arguments).text


def test_a_template_gets_its_arguments() -> None:
    assert rendered("{{ tools | tojson }}{{ date }}", tools=[{"a": 1}], date="today") == '[{"a": 1}]today'
    assert rendered("{{ bos_token }}", bos_token="!") == "!"
    assert len(rendered("{{ a }}", a="x" * 2_000_000)) == 2_000_000


def test_thinking_is_off_unless_an_argument_turns_it_on() -> None:
    source = "{% if enable_thinking is defined and enable_thinking is false %}off{% else %}on{% endif %}"
    assert rendered(source) == "off"
    assert rendered(source, enable_thinking=True) == "on"


def test_an_argument_that_no_template_reads_is_refused() -> None:
    for source in ("{{ messages[0].content }}{{ tools }}", "{# foo #}{{ tools.foo }}{% set foo = 1 %}{{ foo }}"):
        with pytest.raises(UsageError, match="no variable foo") as caught:
            rendered(source, foo=1)
        assert "the template has tools" in caught.value.hint
    with pytest.raises(UsageError, match="enable_thinking to switch thinking") as caught:
        rendered("{{ messages }}", enable_thinking=True)
    assert "no variables" in caught.value.hint
    many = "".join(f"{{{{ v{number:02} }}}}" for number in range(20))
    with pytest.raises(UsageError) as caught:
        template.render(many + "{{ bos_token }}{{ messages }}", [], {"bos_token": "<s>"}, {"foo": 1})
    assert caught.value.hint.endswith("the template has " + ", ".join(f"v{number:02}" for number in range(12)))
    # A name that is read before it is set is a variable.
    assert rendered("{% if foo is not defined %}{% set foo = 2 %}{% endif %}{{ foo }}", foo=1) == "1"


def test_a_document_is_data_not_a_template() -> None:
    assert "{{ 7 * 7 }}{% for %}" in render(CHATML, "{{ 7 * 7 }}{% for %}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (NO_SYSTEM, "System role not supported"),
        ("{% for", "unexpected"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ 1 / 0 }}", "division"),
        ("", "rendered nothing"),
        ("mistral-v7-tekken", "only a name, 'mistral-v7-tekken'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update({'content': ''}) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", "characters"),
        ("{{ 'x' * 10 ** 11 }}", "memory"),
        ("{{ range(10 ** 9) | list }}", "range"),
        ("{{ messages[0].content }}{{ '\\ud800' }}", "half of a pair: character 1 "),
        ("{{ raise_exception('no ' ~ 'x' * 10 ** 6) }}", "no xxx"),
    ],
)
def test_a_template_that_fails_is_one_error(source: str, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        render(source, system="S")
    assert words.lower() in caught.value.message.lower()
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    "source", ["{{ style.upper() }}{{ messages }}", "{% if not style %}{{ raise_exception('no style') }}{% endif %}"]
)
def test_an_argument_that_a_template_needs_is_named(source: str) -> None:
    with pytest.raises(ModelError, match="style") as caught:
        render(source)
    assert " template arguments (not set: style) " in caught.value.hint


@pytest.mark.slow
def test_a_template_that_loops_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "CPU_LIMIT_S", 1)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    started = time.monotonic()
    with pytest.raises(ModelError, match="more than 1 s"):
        render(loop)
    assert time.monotonic() - started < 15


def test_a_template_that_sleeps_in_one_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "WALL_LIMIT_S", 0.5)
    with pytest.raises(ModelError, match="did not end"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
    assert "assistant" in render(CHATML)


@pytest.mark.slow
def test_the_process_is_kept_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    render(CHATML)
    first = template._Child.running()
    assert render(CHATML, document="x" * 300_000).count("x") == 300_000
    assert template._Child.running() is first, "one process renders all"
    monkeypatch.setattr(template, "CPU_LIMIT_S", 1)
    for _ in range(2):
        with pytest.raises(ModelError, match="more than 1 s"):
            render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")
        assert "assistant" in render(CHATML)
    first = template._Child.running()
    first.kill()
    first.wait()
    assert "assistant" in render(CHATML), "someone ended the process"


def test_a_program_may_search_imports_in_a_path_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    template._Child.end()
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    assert "assistant" in render(CHATML)


def test_a_fork_has_a_process_of_its_own() -> None:
    program = (
        "import os\n"
        "from quantspec_cli import template\n"
        "turns = template.messages('D', None, None)\n"
        "def rendered(): return template.render('{{ messages[0].content }}', turns, {}).text == 'D'\n"
        "assert rendered()\n"
        "first = template._Child.running().pid\n"
        "fork = os.fork()\n"
        "if fork == 0:\n"
        "    os._exit(0 if rendered() and template._Child.running().pid != first else 1)\n"
        "_, status = os.waitpid(fork, 0)\n"
        "assert status == 0\n"
        "assert rendered() and template._Child.running().pid == first"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_seconds_of_earlier_conversations_do_not_count() -> None:
    program = (
        "import resource\n"
        "from quantspec_cli import template\n"
        "limits = []\n"
        "for used in (0.1, 99.5):\n"
        "    template.time.process_time = lambda: used\n"
        "    template._limit(1000, 5)\n"
        "    limits.append(resource.getrlimit(resource.RLIMIT_CPU)[0])\n"
        "print(limits)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[6, 105]\n"


def test_ctrl_c_does_not_wait_for_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[subprocess.Popen[bytes]] = []

    def start(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        processes.append(popen(*arguments, **options))
        return processes[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    template._Child.end()
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    waits = []
    while len(waits) < 3 and min(waits, default=1) >= 0.15:  # a busy machine may delay an attempt
        sent: list[float] = []

        def interrupt(times: list[float] = sent) -> None:
            times.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(0.3, interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            render(loop)
        waits.append(time.monotonic() - sent[0])
        assert processes[-1].wait(timeout=10) == -signal.SIGKILL
    assert min(waits) < 0.15, waits


@pytest.mark.parametrize(("kind", "limit"), [("RLIMIT_AS", 900_000 << 10), ("RLIMIT_CPU", 3), ("RLIMIT_CORE", 0)])
def test_lower_limits_are_kept(kind: str, limit: int) -> None:
    number = getattr(resource, kind)
    program = (
        f"import resource; resource.setrlimit({number}, ({limit}, {limit}))\n"
        "from quantspec_cli import template\n"
        "template._limit(1000, 5)\n"
        f"print(resource.getrlimit({number})[1], resource.getrlimit(resource.RLIMIT_CORE)[1])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.split(), done.stderr) == ([str(limit), "0"], "")


@pytest.mark.parametrize("where", ["config", "list", "file", "processor"])
def test_a_template_is_found_where_checkpoints_keep_it(tmp_path: Path, where: str) -> None:
    if where == "file":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    # Mistral Small 3.1 has it there alone.
    processor = CHATML if where == "processor" else "older"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": processor}))
    configs: dict[str, dict[str, Any]] = {
        "processor": {},
        "config": {"chat_template": CHATML},
        "list": {"chat_template": [{"name": [], "template": 1}, 2, {"name": "default", "template": CHATML}]},
        "file": {"chat_template": "older"},
    }
    assert template.find(tmp_path, configs[where]) == CHATML
    assert template.find(tmp_path / "nowhere", {}) is None
    assert template.find(tmp_path / "nowhere", {"chat_template": [{"name": "tool_use", "template": "x"}]}) is None


@pytest.mark.parametrize("wrong", [5, {"default": CHATML}, [{"name": "default", "template": ["x"]}]])
def test_a_template_that_is_no_text_is_one_error(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ModelError, match=r"chat_template .* and no text"):
        template.find(tmp_path, {"chat_template": wrong})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": wrong}))
    with pytest.raises(ModelError, match=r"chat_template .* and no text"):
        template.find(tmp_path, {})


def test_a_rendered_prompt_is_encoded_without_a_second_bos(fake: Any, tmp_path: Path) -> None:
    from quantspec_cli.model import Model

    source = "{{ bos_token }}{% for m in messages %}[{{ m.content }}]{% endfor %}"
    model = Model.open(chat_model(tmp_path / "chat", source))
    prompt = model.prompt("D", instruction="I")
    assert prompt.ids.count(1) == 1
    assert prompt.ids == [1, *model.tokenizer.encode("[D\n\nI]", special=False)]
    assert not prompt.continues
    assert model.prompt("D").ids == [1, *model.tokenizer.encode("D", special=False)]


def test_a_base_model_gets_plain_text_and_a_note(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    from quantspec_cli.model import Model

    model = Model.open(None)
    prompt = model.prompt("D", instruction="I", system_prompt="S")
    assert prompt.ids == model.tokenizer.encode("S\n\nD\n\nI\n\n")
    document = tmp_path / "d.txt"
    document.write_text("D")
    for arguments in (("run", str(document)), ("batch", str(document), "--out", str(tmp_path / "out"))):
        outcome = quantspec(*arguments, "--instruction", "I", "-n", "3")
        assert outcome.code == 0
        assert "no chat template" in outcome.stderr


def test_a_template_error_on_the_command_line(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "chat", NO_SYSTEM)
    outcome = quantspec("run", "-m", model, "--text", "D", "--system-prompt", "S")
    outcome.assert_error(1, "System role not supported", "--system-prompt")
    assert quantspec("run", "-m", model, "--text", "D", "--instruction", "I", "-n", "3", "-q").code == 0


@pytest.mark.parametrize("instruction", ["", " \n"])
def test_an_empty_instruction_is_refused(fake: Any, quantspec: Run, tmp_path: Path, instruction: str) -> None:
    document = tmp_path / "a.txt"
    document.write_text("D")
    run = ("run", str(document), "-n", "3", "--instruction", instruction)
    quantspec(*run).assert_error(2, "the instruction is empty", "leave it out")
    batch = ("batch", str(document), "--out", str(tmp_path / "out"), "-n", "3", "--instruction", instruction)
    quantspec(*batch).assert_error(2, "the instruction is empty")
    assert not (tmp_path / "out").exists()
    # An empty system prompt is one.
    assert quantspec("run", str(document), "-n", "3", "-q", "--system-prompt", "").code == 0


def test_an_interrupt_leaves_no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end the process of a later conversation."""
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if isinstance(thread, threading.Timer):
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        render(CHATML)
    monkeypatch.undo()
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    for timer in timers:
        timer.join(5)
        assert not timer.is_alive()
    assert render(CHATML)
