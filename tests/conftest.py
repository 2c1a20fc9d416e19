"""Fixtures. Nothing here touches the network."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_native
import hypothesis
import pytest

import quantspec_cli
from quantspec_cli import entry, hub, sources

# Set before huggingface_hub is imported, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"
# Read before it is removed: long runs repeat more.
LONG = bool(os.environ.get("QUANTSPEC_LAWS"))
# The user's own settings must not affect tests.
for variable in [name for name in os.environ if name.startswith("QUANTSPEC_")]:
    if variable not in {"QUANTSPEC_SIMD", "QUANTSPEC_REQUIRE_GPU", "QUANTSPEC_TEST_MODELS"}:
        del os.environ[variable]
os.environ["QUANTSPEC_CONFIG"] = os.devnull
# Tests must not fill the user's cache.
os.environ["QUANTSPEC_DRAFT_CACHE"] = "off"

# A test suite in the background ignores SIGINT (under nohup also SIGHUP), and its child commands would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

DEMO = hub.demo()

# No deadline: a busy machine must not fail a property.
hypothesis.settings.register_profile("quantspec", deadline=None, max_examples=2000 if LONG else 100)
hypothesis.settings.load_profile("quantspec")


def tool(name: str) -> ModuleType:
    """A script of tools/ as a module."""
    folder = Path(__file__).parents[1] / "tools"
    # As for a script run by Python: it may import its neighbours.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # dataclasses look up the module of their fields' types here.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Outcome:
    """Result of a command."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    def assert_error(self, code: int, *words: str) -> None:
        """Checks for one error line and one hint line that contain these words, and an empty stdout."""
        lines = self.stderr.splitlines()
        assert self.code == code, self
        assert self.stdout == "", self
        assert len(lines) == 2, self
        assert lines[0].startswith("error: "), self
        assert lines[1].startswith("hint: "), self
        for word in words:
            assert word in self.stderr, (word, self.stderr)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[fake_native.Script]:
    """The toy model instead of the native module."""
    monkeypatch.setitem(sys.modules, "quantspec_cli._native", fake_native)
    monkeypatch.setattr(quantspec_cli, "_native", fake_native, raising=False)
    fake_native.Script.reset()
    return fake_native.Script


@pytest.fixture
def quantspec(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs a command line in this process."""

    def run(*arguments: str) -> Outcome:
        capfd.readouterr()
        code = entry.execute(arguments)
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def gpu(quantspec: Callable[..., Outcome]) -> dict[str, Any]:
    """The first GPU. Without one the test is skipped; with `QUANTSPEC_REQUIRE_GPU=1` it fails."""
    report = quantspec("doctor", "--json").json["gpu"]
    if not report["available"]:
        stop = pytest.fail if os.environ.get("QUANTSPEC_REQUIRE_GPU") else pytest.skip
        stop(f"no GPU: {report['reason']}")
    first: dict[str, Any] = report["devices"][0]
    return first


@pytest.fixture
def toy_command() -> list[str]:
    """The command line with the toy model, for a separate process."""
    here = str(Path(__file__).parent)
    program = (
        f"import sys; sys.path.insert(0, {here!r}); import fake_native; fake_native.install(); "
        "from quantspec_cli.__main__ import main; main()"
    )
    return [sys.executable, "-c", program]


@pytest.fixture
def obedient(toy_command: list[str]) -> Callable[..., Outcome]:
    """Runs a command line with the toy model in a process without root's rights, even if root runs the tests."""
    prefix: list[str] = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may read everything, and there is no setpriv to change that")
        prefix = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]

    def run(*arguments: str, **options: Any) -> Outcome:
        command = [*prefix, *toy_command, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **options)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


class Child(subprocess.Popen[bytes]):
    """A command with the toy model.

    Attributes:
        stages: file in which the toy records each stage it begins.
    """

    stages: Path

    def until(self, stage: str, times: int = 1) -> None:
        """Waits until the toy has begun this many loads, prefills or verifications ("load", "prefill", "verify")."""
        while not self.stages.exists() or self.stages.read_text().split().count(stage) < times:
            assert self.poll() is None
            time.sleep(0.005)


@pytest.fixture
def start(toy_command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Child]:
    """Starts the command line with the toy model in a separate process."""

    def run(*arguments: str, script: dict[str, Any] | None = None, **options: Any) -> Child:
        stages = tmp_path_factory.mktemp("toy") / "stages"
        environment = {**os.environ, "FAKE_NATIVE": json.dumps(script or {}), "FAKE_NATIVE_STAGES": str(stages)}
        environment |= options.pop("env", {})
        child = Child(
            [*toy_command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options
        )
        child.stages = stages
        return child

    return run


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """A short document."""
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night; the rain fell in torrents.", encoding="utf-8")
    return path


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """Three documents in two folders."""
    folder = tmp_path / "docs"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "a.txt").write_text("It was a dark and stormy night.")
    (folder / "b.md").write_text("# Title\n\nThe rain fell in torrents.")
    (folder / "deep" / "er" / "c.txt").write_text("Except at occasional intervals. " * 5)
    return folder


def lines(out: Path) -> list[dict[str, Any]]:
    """The objects of results.jsonl, which has complete lines only."""
    raw = (out / "results.jsonl").read_bytes()
    assert raw == b"" or raw.endswith(b"\n")
    return [json.loads(line) for line in raw.decode().splitlines()]


def answers(out: Path) -> dict[str, bytes]:
    """Every file below OUT that is an answer."""
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file() and sources.STATE not in path.parts and path.name != "results.jsonl"
    }


def written(out: Path) -> int:
    """Complete lines of results.jsonl."""
    path = out / "results.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def rest_of(terminal: int) -> bytes:
    """The rest of a pseudo-terminal's output, which is then closed."""
    seen = b""
    with contextlib.suppress(OSError):  # a terminal's error after the last writer has closed it
        while True:
            seen += os.read(terminal, 1 << 16)
    os.close(terminal)
    return seen


def exact_activations() -> dict[str, str]:
    """The environment of a process whose kernels have f32 activations, on its fastest such path."""
    from quantspec_cli import _native

    avx2 = _native.doctor()["cpu"]["simd"] in {"avx2", "avx512", "amx"}
    return {**os.environ, "QUANTSPEC_SIMD": "avx2" if avx2 else "scalar"}


def ids_of(text: str) -> list[int]:
    """Tokens of the demo model, none added."""
    from tokenizers import Tokenizer

    return list(Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def chat_model(folder: Path, source: str, generation_config: Any = None) -> str:
    """A checkpoint directory like the demo's with a chat template and an optional generation_config.json."""
    model = copy_demo(folder)
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": source}))
    if generation_config is not None:
        (model / "generation_config.json").write_text(json.dumps(generation_config))
    return str(model)


def copy_demo(target: Path, **config: Any) -> Path:
    """A checkpoint directory like the demo's, with other values in config.json; weights are linked."""
    target.mkdir(exist_ok=True)
    settings = {**json.loads((DEMO / "config.json").read_text()), **config}
    (target / "config.json").write_text(json.dumps(settings))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (target / name).symlink_to(DEMO / name)
    return target


def damaged(whole: bytes, rounds: int) -> Iterator[bytes]:
    """Copies of a file with up to 20 other bytes, every third cut short."""
    dice = random.Random(5)
    for round in range(rounds):
        data = bytearray(whole)
        if round % 3 == 0:
            del data[dice.randrange(len(data)) :]
        for _ in range(1 + round % 20):
            if data:
                data[dice.randrange(len(data))] = dice.randrange(256)
        yield bytes(data)
