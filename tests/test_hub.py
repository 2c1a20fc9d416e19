"""Finding models: the demo, directories, and the hub (a local server that speaks its protocol)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, Outcome, copy_demo

from quantspec_cli import hub
from quantspec_cli.errors import FileError, InputError, ModelError, QuantspecError, UsageError
from quantspec_cli.model import Model

Run = Callable[..., Outcome]
Start = Callable[..., "subprocess.Popen[bytes]"]

DISK, FILES, TLS, AGAIN = "set HF_HOME to another disk", "HF_TOKEN_PATH", "SSL_CERT_FILE", "run the command again"

SHA = "0123456789abcdef0123456789abcdef01234567"
# Files of repositories that are not needed.
OTHERS = {
    "README.md": b"# model",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"a second copy",
    "original/consolidated.00.pth": b"pickle",
    "modeling_custom.py": b"raise SystemExit",
    "onnx/model.onnx": b"onnx",
}


def repository() -> dict[str, bytes]:
    return {**{path.name: path.read_bytes() for path in DEMO.iterdir()}, **OTHERS}


class Hub(ThreadingHTTPServer):
    """Serves one repository, owner/model, with the revision `main` and the commit `SHA`."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.fetched: list[str] = []
        self.gated = False
        self.pause_s = 0.0  # in the middle of every large file
        self.paused = threading.Event()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A killed command breaks its connection, which may be noticed during a later test: nothing to print then."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        known = path.startswith(("api/models/owner/model", "owner/model/resolve/"))
        if not known:
            self._reply(404, b"{}", {"X-Error-Code": "RepoNotFound"}, send=send)
        elif "/nonsense" in path:
            self._reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"}, send=send)
        elif self.server.gated:
            self._reply(403, b"{}", {"X-Error-Code": "GatedRepo"}, send=send)
        elif path.startswith("api/") and "/tree/" in path:
            entries = [
                {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
                for name, body in self.server.files.items()
            ]
            self._reply(200, json.dumps(entries).encode(), {}, send=send)
        elif path.startswith("api/"):
            info = {"id": "owner/model", "sha": SHA, "siblings": [{"rfilename": name} for name in self.server.files]}
            self._reply(200, json.dumps(info).encode(), {}, send=send)
        else:
            name = path.partition("/resolve/")[2].partition("/")[2]
            body = self.server.files[name]
            if send:
                self.server.fetched.append(name)
            etag = hashlib.sha1(body).hexdigest()
            self._reply(200, body, {"ETag": f'"{etag}"', "X-Repo-Commit": SHA}, send=send)

    def _reply(self, code: int, body: bytes, headers: dict[str, str], *, send: bool) -> None:
        self.send_response(code)
        for key, value in {**headers, "Content-Length": str(len(body)), "Content-Type": "application/json"}.items():
            self.send_header(key, value)
        self.end_headers()
        if send:
            half = len(body) // 2
            self.wfile.write(body[:half])
            if len(body) > 10**6 and self.server.pause_s:
                self.server.paused.set()
                time.sleep(self.server.pause_s)
            self.wfile.write(body[half:])


@pytest.fixture
def server() -> Iterator[Hub]:
    with Hub(repository()) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


@pytest.fixture
def online(start: Start, server: Hub, tmp_path: Path) -> Callable[..., Outcome]:
    """Runs a command in a process that uses the local hub, with an empty cache."""
    home = tmp_path / "home"

    def run(*arguments: str, **environment: str) -> Outcome:
        settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **environment}
        child = start(*arguments, env=settings)
        out, err = child.communicate(timeout=120)
        return Outcome(child.returncode, out.decode(), err.decode())

    return run


@pytest.mark.slow
def test_only_what_is_needed_is_fetched_and_only_once(online: Run, server: Hub) -> None:
    command = ["run", "--model", "owner/model", "--text", "x", "-n", "3", "--json"]
    first = online(*command)
    assert (first.code, first.stderr) == (0, ""), first
    assert sorted(server.fetched) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert first.json["model"] == "owner/model"
    again = online(*command)
    assert again.json["results"] == first.json["results"]
    assert len(server.fetched) == len(set(server.fetched))
    for offline in (["--offline"], []):
        cached = online(*command, *offline, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="" if offline else "1")
        assert cached.json["results"] == first.json["results"]


@pytest.mark.slow
def test_a_revision_by_flag_or_in_the_name(online: Run) -> None:
    for arguments in (["-m", f"owner/model@{SHA}"], ["-m", "owner/model", "--revision", "main"]):
        assert online("run", *arguments, "--text", "x", "-n", "3").code == 0
    online("run", "-m", "owner/model@nonsense", "--text", "x").assert_error(1, "owner/model", "no revision nonsense")
    online("run", "-m", "owner/model@a", "--revision", "b", "--text", "x").assert_error(2, "two revisions")


@pytest.mark.slow
def test_a_refusal_of_the_hub_is_one_error(online: Run, server: Hub) -> None:
    online("run", "-m", "owner/nothing", "--text", "x").assert_error(1, "owner/nothing", "HF_TOKEN")
    online("run", "-m", "nothing", "--text", "x").assert_error(1, "neither a directory nor a model")
    online("run", "-m", "owner/model", "--text", "x", HF_ENDPOINT="http://127.0.0.1:9").assert_error(
        1, "owner/model", "cannot be reached"
    )
    server.gated = True
    online("run", "-m", "owner/model", "--text", "x").assert_error(1, "gated", "licence", "HF_TOKEN")
    server.gated = False
    del server.files["config.json"]
    online("run", "-m", "owner/model", "--text", "x").assert_error(1, "no config.json")


@pytest.mark.parametrize(
    "environment",
    [{"ALL_PROXY": "socks5://127.0.0.1:9"}, {"HTTPS_PROXY": "garbage://x"}, {"HF_TOKEN": "hf_\u00e9"}],
)
def test_a_misconfigured_network_is_not_an_internal_error(online: Run, environment: dict[str, str]) -> None:
    online("run", "-m", "owner/model", "--text", "x", **environment).assert_error(
        1, "downloading owner/model failed", "HTTPS_PROXY", "HF_TOKEN"
    )


@pytest.mark.parametrize("address", ["nonsense", "ftp://x", "http://", "http://[", "http://x:99999", "huggingface.co"])
def test_an_address_that_is_none_is_named(online: Run, address: str) -> None:
    online("run", "-m", "owner/model", "--text", "x", HF_ENDPOINT=address).assert_error(
        2, f"HF_ENDPOINT is {address!r}", "https://huggingface.co"
    )


class ProxyError(ConnectionError):
    """As the HTTP libraries call it."""


class ReadTimeout(type("TimeoutException", (Exception,), {})):  # type: ignore[misc]
    """As the HTTP libraries call it."""


class InvalidProxyError(OSError, ValueError):
    """As requests calls it."""


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ProxyError("no"), False),
        (InvalidProxyError("no"), False),
        (RuntimeError("no"), False),
        (ReadTimeout("no"), True),
        (TimeoutError("no"), True),
    ],
)
def test_only_transient_failures_recommend_a_retry(
    monkeypatch: pytest.MonkeyPatch, error: Exception, again: bool
) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError) as caught:
        hub.resolve("owner/model")
    assert (AGAIN in caught.value.hint) == again
    assert ("HTTPS_PROXY" in caught.value.hint) != again


@pytest.mark.parametrize("answer", [b"<html>log in\nhere</html>", b'{"unexpected": 1}', b"[]"])
def test_an_answer_of_another_server_is_not_an_internal_error(
    online: Run, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    monkeypatch.setattr(Handler, "_answer", lambda self, *, send: self._reply(200, answer, {}, send=send))
    outcome = online("run", "-m", "owner/model", "--text", "x")
    outcome.assert_error(1, "owner/model")
    assert "defect" not in outcome.stderr


@pytest.mark.parametrize(
    ("error", "certificate", "kind", "hint"),
    [
        *((OSError(number, "no"), "", FileError, DISK) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)),
        *((OSError(number, "no"), "", FileError, DISK) for number in (errno.EACCES, errno.EPERM)),
        (ssl.SSLError(136, "no certificate"), "", ModelError, TLS),
        (OSError(errno.ENOENT, "no"), "/none", ModelError, TLS),
        (OSError(errno.ENOENT, "no", "/a/b"), "", FileError, FILES),
        (OSError(errno.ENAMETOOLONG, "no", "/a/b"), "/none", FileError, FILES),
        (OSError("no"), "", ModelError, AGAIN),
        (OSError(errno.ECONNRESET, "no"), "", ModelError, AGAIN),
    ],
)
def test_the_hint_of_a_failed_download_fits(
    monkeypatch: pytest.MonkeyPatch, error: OSError, certificate: str, kind: type[QuantspecError], hint: str
) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> str:
        raise error

    for name in ("SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", certificate)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind) as caught:
        hub.resolve("owner/model")
    assert hint in caught.value.hint
    assert (DISK in caught.value.hint) == (hint == DISK)
    assert error.filename is None or error.filename in caught.value.message


@pytest.mark.parametrize(
    ("revision", "kind"),
    [("a\udcff", InputError), (5, UsageError), (b"main", UsageError), ("..", UsageError), ("a/../../b", UsageError)],
)
def test_revisions_that_cannot_be(revision: Any, kind: type[QuantspecError]) -> None:
    with pytest.raises(kind, match="--revision"):
        hub.resolve("owner/model", revision=revision)
    if kind is UsageError and isinstance(revision, str):
        with pytest.raises(kind, match="--revision"):
            hub.resolve(f"owner/model@{revision}")


def test_offline_and_not_in_the_cache_is_one_error(fake: Any, quantspec: Run) -> None:
    quantspec("run", "-m", "owner/model", "--text", "x").assert_error(1, "owner/model", "cache", "HF_HUB_OFFLINE")
    quantspec("run", "-m", "owner/model", "--offline", "--text", "x").assert_error(1, "owner/model", "--offline")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("./nowhere", "does not exist"),
        ("/no/such/place", "does not exist"),
        ("a/b/c", "does not exist"),
        ("model.Q8_0.gguf", "model file model.Q8_0.gguf does not exist"),
        ("~nobody/x", "does not exist"),
        ("owner/..", "does not exist"),
        ("https://huggingface.co/owner/model", "give a hub id such as owner/name"),
        ("owner/a--b", "does not exist"),
        ("owner/name with space", "does not exist"),
        ("x" * 5000, "no valid hub id"),
        ("a\0b", "does not exist"),
        ("a\udcff", "is not UTF-8"),
    ],
)
def test_names_that_cannot_be_models(fake: Any, quantspec: Run, tmp_path: Path, model: str, words: str) -> None:
    quantspec("run", "-m", model, "--text", "x").assert_error(1, words)
    quantspec("run", "-m", model, "--text", "x", "-o", f"{tmp_path}/a.txt").assert_error(1, words)


def test_a_model_without_a_name(fake: Any, quantspec: Run) -> None:
    quantspec("run", "-m", "", "--text", "x").assert_error(2, "the name of the model is empty")


def test_nonsense_in_a_variable_of_the_hub_is_named(toy_command: list[str]) -> None:
    environment = {**os.environ, "HF_HUB_ETAG_TIMEOUT": "soon"}
    del environment["QUANTSPEC_DRAFT_CACHE"]
    for arguments in (["run", "--text", "x"], ["doctor"]):
        command = [*toy_command, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: HF_HUB_ETAG_TIMEOUT: ")
        assert len(done.stderr.splitlines()) == 2


def test_a_file_is_not_a_model(fake: Any, quantspec: Run) -> None:
    quantspec("run", "-m", str(DEMO / "model.safetensors"), "--text", "x").assert_error(1, "is a file", "directory")


def test_without_a_home_directory_nothing_is_fetched_and_no_draft_kept(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_", "QUANTSPEC_"))}
    del clean["HOME"]
    # A user known to the system has a home directory.
    program = (
        "import pwd, sys\n"
        "def nobody(_): raise KeyError\n"
        "pwd.getpwuid = nobody\n"
        "from quantspec_cli.__main__ import main; main()"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program, *arguments]
        return subprocess.run(command, env=clean, cwd=tmp_path, capture_output=True, text=True, check=False)

    refused = run("run", "-m", "owner/name", "--text", "x")
    assert refused.returncode == 1
    assert refused.stderr.startswith(
        "error: the hub's cache has no folder: no home directory is known\nhint: set HF_HOME"
    )
    assert "draft cache off: no home directory is known" in run("doctor").stdout
    assert run("run", "--text", "x", "-n", "2").returncode == 0
    assert os.listdir(tmp_path) == []


def test_a_directory_without_config_or_weights(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    quantspec("run", "-m", str(tmp_path / "empty"), "--text", "x").assert_error(1, "no config.json")
    model = copy_demo(tmp_path / "m")
    (model / "model.safetensors").unlink()
    quantspec("run", "-m", str(model), "--text", "x").assert_error(1, "no weights")


def test_a_directory_that_may_not_be_searched_is_one_error(obedient: Run, tmp_path: Path) -> None:
    model = tmp_path / "owner" / "model"
    model.parent.mkdir()
    copy_demo(model)
    command = ["run", "--text", "x", "-n", "2", "--json", "-m"]
    for closed, name in ((model, str(model)), (model.parent, str(model)), (model.parent, "owner/model")):
        closed.chmod(0)
        outcome = obedient(*command, name, cwd=tmp_path)
        # The hub is not contacted either.
        assert (outcome.code, outcome.json["error"]["kind"]) == (1, "io"), outcome
        assert outcome.json["error"]["message"].endswith("cannot be read: permission denied")
        closed.chmod(0o755)
    assert obedient(*command, "owner/model", cwd=tmp_path).code == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_file_of_a_model_without_permission_is_one_error(obedient: Run, tmp_path: Path, name: str) -> None:
    model = copy_demo(tmp_path / "m")
    (model / name).unlink(missing_ok=True)
    (model / name).touch(mode=0)
    outcome = obedient("run", "-m", str(model), "--text", "x", "--instruction", "Go on.")
    outcome.assert_error(1, f"{name} cannot be read: permission denied", "permissions")


def test_a_directory_needs_no_network_and_has_no_revision(fake: Any, quantspec: Run, tmp_path: Path) -> None:
    model = str(copy_demo(tmp_path / "m"))
    assert quantspec("run", "-m", model, "--text", "x", "-n", "3").code == 0
    quantspec("run", "-m", model, "--revision", "main", "--text", "x").assert_error(2, "revision")


def test_a_directory_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("owner/model") == Path("owner/model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/owner") == tmp_path / "owner"


def test_a_path_is_absolute_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.absolute("model") == hub.absolute("~/model") == str(tmp_path / "model")
    assert hub.absolute("owner/model@main") == "owner/model@main"
    assert hub.absolute(None) is None


def test_the_demo_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("demo") == hub.describe("demo") == hub.resolve(None) == DEMO
    # A directory of that name comes first.
    copy_demo(tmp_path / "demo")
    assert hub.resolve("demo") == Path("demo")


def test_names_that_cannot_be_on_the_hub_are_not_requested(
    quantspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "_from_hub", None)
    for arguments in (["-m", "demo@x"], ["-m", "demo:Q8_0"], ["-m", "demo", "--revision", "x"]):
        quantspec("run", *arguments, "--text", "x").assert_error(2, "the demo model has no revisions")
    (tmp_path / "s.gguf").touch()
    for name in ("s.gguf:Q8_0", "s.gguf@x", str(tmp_path / "s.gguf:Q8_0")):
        quantspec("run", "-m", name, "--text", "x").assert_error(2, name, "the file alone")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_download_leaves_the_progress_bars_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    import huggingface_hub
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = []

    def download(*_: Any, **__: Any) -> str:
        shown.append(not are_progress_bars_disabled())
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (enable_progress_bars if enabled else disable_progress_bars)()
    try:
        for progress in (False, True):
            with pytest.raises(FileError):
                hub.resolve("owner/model", progress=progress)
            assert are_progress_bars_disabled() != enabled
    finally:
        enable_progress_bars()
    assert shown == [False, enabled]


def test_a_config_that_is_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelError, match=r"config\.json is not a file"):
        Model.open(str(tmp_path))


def test_the_demo_is_complete() -> None:
    names = set(os.listdir(hub.resolve(None)))
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "LICENSE.txt"}


@pytest.mark.slow
def test_ctrl_c_ends_a_download_at_once_and_it_resumes(start: Start, server: Hub, tmp_path: Path) -> None:
    settings = {"HF_ENDPOINT": server.endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    server.pause_s = 30
    child = start("run", "-m", "owner/model", "--text", "x", "-n", "3", env=settings)
    assert server.paused.wait(60)
    child.send_signal(signal.SIGINT)
    sent = time.monotonic()
    out, err = child.communicate(timeout=60)
    # It does not wait for the server; the end of a process may take long on a busy machine.
    assert time.monotonic() - sent < server.pause_s / 2
    assert (child.returncode, out, err) == (130, b"", b"error: interrupted\nhint: run the command again\n")
    server.pause_s = 0
    child = start("run", "-m", "owner/model", "--text", "x", "-n", "3", env=settings)
    child.communicate(timeout=120)
    assert child.returncode == 0


@pytest.fixture
def resolve(server: Hub, tmp_path: Path) -> Callable[..., str]:
    """Path of a model on the local hub, or the error, in a process with an empty cache."""
    program = (
        "import sys\nfrom quantspec_cli import hub\nfrom quantspec_cli.errors import QuantspecError\n"
        "try: print(getattr(hub, sys.argv[1])(sys.argv[2], offline=len(sys.argv) > 3))\n"
        "except QuantspecError as error: print(error.message, error.hint)"
    )

    def run(model: str, *arguments: str, function: str = "resolve", endpoint: str = server.endpoint) -> str:
        environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
        command = [sys.executable, "-c", program, function, model, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    return run


@pytest.mark.slow
def test_a_gguf_file_is_chosen_by_a_part_of_its_name(server: Hub, resolve: Callable[..., str]) -> None:
    parts = {f"big/x-Q4_0-0000{number}-of-00002.gguf": b"part %d" % number for number in (1, 2)}
    server.files = {"config.json": b"{}", "x.Q8_0.gguf": b"GGUF", "mmproj-x.gguf": b"GGUF", **parts}
    several = resolve("owner/model")
    assert "owner/model holds 2 GGUF models: big/x-Q4_0-00001-of-00002.gguf, x.Q8_0.gguf" in several
    assert "owner/model:NAME" in several
    assert resolve("owner/model:q8_0").endswith(f"{SHA}/x.Q8_0.gguf")
    assert resolve("owner/model:Q4_0").endswith(f"{SHA}/big/x-Q4_0-00001-of-00002.gguf")
    assert sorted(server.fetched) == sorted(["config.json", "x.Q8_0.gguf", *parts])
    absent = resolve("owner/model:Q8")
    assert "has no GGUF file called Q8 it has big/x-Q4_0-00001-of-00002.gguf, x.Q8_0.gguf" in absent
    assert "does not exist" in resolve("owner/model:")
    assert resolve("owner/model:Q8_0", "--offline").endswith(f"{SHA}/x.Q8_0.gguf")
    assert len(server.fetched) == len(set(server.fetched))


def test_the_only_gguf_file_needs_no_name(server: Hub, resolve: Callable[..., str]) -> None:
    server.files = {"README.md": b"# model", "x.Q8_0.gguf": b"GGUF"}
    assert resolve(f"owner/model@{SHA}").endswith(f"{SHA}/x.Q8_0.gguf")
    assert server.fetched == ["x.Q8_0.gguf"]


@pytest.mark.slow
def test_a_downloaded_gguf_file_needs_no_network(server: Hub, resolve: Callable[..., str]) -> None:
    server.files = {"x.Q8_0.gguf": b"GGUF", "x.Q4_0.gguf": b"GGUF"}
    nowhere = "http://127.0.0.1:9"
    assert "cannot be reached" in resolve("owner/model:Q8_0", endpoint=nowhere)
    resolve("owner/model:Q8_0")
    for model in ("owner/model:Q8_0", "owner/model"):
        assert resolve(model, endpoint=nowhere).endswith(f"{SHA}/x.Q8_0.gguf")
    absent = resolve("owner/model:Q4_0", endpoint=nowhere)
    assert "has no GGUF file called Q4_0 of owner/model, and the hub cannot be reached" in absent


@pytest.mark.slow
@pytest.mark.parametrize("listed", [True, False])
def test_weights_that_are_not_in_the_cache_are_no_fault_of_the_hub(
    resolve: Callable[..., str], tmp_path: Path, listed: bool
) -> None:
    """`listed`: the library knows all files of the repository, as recent versions do."""
    resolve("owner/model", function="describe")
    if not listed:
        for place in tmp_path.rglob("trees"):
            shutil.rmtree(place)
    known = any(tmp_path.rglob("trees"))
    nowhere = "http://127.0.0.1:9"
    for model, what in (
        (
            "owner/model",
            "only a part of model owner/model is in the cache" if known else "has no weights of owner/model",
        ),
        ("owner/model:Q8_0", "has no GGUF file called Q8_0 of owner/model"),
    ):
        assert what in (answer := resolve(model, "--offline")), answer
        assert "leave out --offline, unset HF_HUB_OFFLINE and QUANTSPEC_OFFLINE" in answer
        assert what in (answer := resolve(model, endpoint=nowhere)), answer
        assert "and the hub cannot be reached" in answer
    assert resolve("owner/model:Q8_0", function="describe").startswith("no GGUF file of owner/model:Q8_0")
    assert resolve("owner/model").endswith(SHA)


@pytest.mark.slow
def test_a_description_names_the_downloaded_files_to_choose_from(server: Hub, resolve: Callable[..., str]) -> None:
    server.files = {"x.Q8_0.gguf": b"GGUF", "x.Q4_0.gguf": b"GGUF"}
    assert "no GGUF file of it has been downloaded" in resolve("owner/model", function="describe")
    resolve("owner/model:Q8_0")
    assert resolve("owner/model", function="describe").endswith(f"{SHA}/x.Q8_0.gguf")
    resolve("owner/model:Q4_0")
    assert "owner/model holds 2 GGUF models" in resolve("owner/model", function="describe")


def test_safetensors_are_preferred(server: Hub, resolve: Callable[..., str]) -> None:
    server.files = {**repository(), "x.Q8_0.gguf": b"GGUF"}
    assert resolve("owner/model").endswith(SHA)


@pytest.mark.parametrize(
    "weights",
    [
        ["model.safetensors.index.json", "model.safetensors-00001-of-00001.safetensors"],
        ["quantize_config.json", "gptq_model-4bit-128g.safetensors"],
        ["quant_config.json", "model.safetensors"],
    ],
)
def test_weights_with_other_names_are_fetched(server: Hub, resolve: Callable[..., str], weights: list[str]) -> None:
    others = ["consolidated.safetensors", "consolidated-00001-of-00001.safetensors"]
    server.files = {name: name.encode() for name in ["config.json", *weights, *others]}
    assert resolve("owner/model").endswith(SHA)
    assert sorted(server.fetched) == sorted(["config.json", *weights])
