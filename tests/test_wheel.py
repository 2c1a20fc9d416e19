"""The installed command with its real engine: the same text with every drafter, and no loss of data."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from conftest import DEMO, Outcome, rest_of

from quantspec_cli import Engine, hub
from quantspec_cli.engine import Statistics
from quantspec_cli.model import Prompt

Run = Callable[..., Outcome]

STORIES = Path(__file__).parent / "data" / "stories260K"
SAMPLE = Path(hub.__file__).with_name("sample.txt")


def test_a_third_party_s_story_word_by_word() -> None:
    reference = json.loads((STORIES / "greedy_reference.json").read_text())
    for method in ("ar", "quantspec"):
        engine = Engine.load(STORIES, method=method, gamma="auto" if method == "ar" else 5)
        prompt = Prompt(reference["prompt_ids"], continues=False)
        answer = engine.generate(prompt, max_new_tokens=len(reference["generated_ids"]))
        assert answer.tokens == reference["generated_ids"]
        assert answer.text.strip() == reference["text"].strip()


@pytest.mark.slow
def test_every_way_of_drafting_prints_the_same_document(quantspec: Run) -> None:
    command = ["run", "--prompt", str(SAMPLE), "-n", "60", "--json"]
    plain = quantspec(*command, "--method", "ar").json
    assert plain["stats"]["drafted_tokens"] == 0
    for flags in (
        ["--gamma", "4"],
        ["--method", "kv4", "--gamma", "16"],
        ["--method", "w4", "--gamma", "1"],
        ["--method", "ngram", "--gamma", "6"],
        ["--method", "ngram"],
        ["--gamma", "7", "--draft-pages", "3"],
        ["--gamma", "7", "--draft-pages", "3", "--page-choice", "window"],
        ["--gamma", "3", "--draft-weights", "int4-mlp"],
        ["--gamma", "3", "--draft-weights", "none", "--threads", "1"],
        [],
    ):
        report = quantspec(*command, *flags).json
        assert report["results"] == plain["results"], flags
        stats = report["stats"]
        if "--gamma" in flags:
            assert stats["drafted_tokens"] > 0
            assert 0 < stats["acceptance_rate"] <= 1
        assert 1 + stats["rounds"] + stats["accepted_tokens"] == report["results"][0]["new_tokens"] == 60
        assert stats["acceptance_rate_per_position"] == sorted(stats["acceptance_rate_per_position"], reverse=True)


def test_a_batch_prints_what_each_document_prints_alone(quantspec: Run, document: Path) -> None:
    flags = ["-n", "40", "--gamma", "4", "--temp", "0.8", "--seed", "5", "--json"]
    prompts = [("--prompt", str(SAMPLE)), ("--prompt", str(document)), ("--text", "The")]
    alone = [quantspec("run", *prompt, *flags).json["results"][0] for prompt in prompts]
    together = quantspec("run", *chain(*prompts), *flags).json["results"]
    assert together == alone


@pytest.mark.slow
def test_a_stop_string_cuts_the_text_of_any_method_at_the_same_place(quantspec: Run) -> None:
    command = ["run", "--prompt", str(SAMPLE), "-n", "80", "--json"]
    whole = quantspec(*command).json["results"][0]["text"]
    # Letters from the middle, which begin and end inside tokens.
    stop = whole[len(whole) // 2 : len(whole) // 2 + 7]
    cut = {
        quantspec(*command, "--stop", stop, "--gamma", gamma).json["results"][0]["text"] for gamma in ("0", "3", "16")
    }
    assert cut == {whole[: whole.index(stop)]}


def test_text_streams_and_ends_as_json_says(quantspec: Run) -> None:
    flags = ["--prompt", str(SAMPLE), "-n", "50"]
    text = quantspec("run", *flags)
    assert text.stdout.rstrip("\n") == quantspec("run", *flags, "--json").json["results"][0]["text"].rstrip("\n")
    assert "(length)" in text.stderr


def test_doctor_describes_this_machine(quantspec: Run) -> None:
    report = quantspec("doctor", "--json").json
    assert report["cpu"]["threads"] >= 1
    assert report["cpu"]["read_gb_per_s"] > 0.1
    assert report["cpu"]["simd"] in {"scalar", "avx2", "avx512", "amx", "neon"}
    assert report["gpu"]["available"] or report["gpu"]["reason"]
    assert report["memory_bytes"] > 10**8
    assert quantspec("doctor").code == 0


@pytest.mark.slow
def test_the_self_test_passes_on_a_small_model(quantspec: Run) -> None:
    report = quantspec("selftest", "--model", str(STORIES), "--threads", "1", "--json")
    assert report.code == 0
    assert report.json["passed"]
    assert report.json["compared_tokens"] > 20_000


@pytest.mark.slow
def test_ctrl_c_within_0_3_s_while_a_long_document_is_read(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(SAMPLE.read_text(encoding="utf-8") * 30, encoding="utf-8")
    waits = []
    for _ in range(3):
        # On a terminal a bar shows that prefill has begun.
        terminal, end = pty.openpty()
        child = subprocess.Popen(
            [sys.executable, "-m", "quantspec_cli", "run", "--prompt", str(book), "-n", "5"],
            stdout=subprocess.PIPE,
            stderr=end,
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(end)
        seen = b""
        while b"%" not in seen.partition(b"reading the prompt")[2]:
            seen += os.read(terminal, 1 << 16)
        child.send_signal(signal.SIGINT)
        sent = time.monotonic()
        out, _ = child.communicate(timeout=60)
        waits.append(time.monotonic() - sent)
        seen += rest_of(terminal)
        assert (child.returncode, out) == (130, b"")
        assert seen.endswith(b"error: interrupted\r\nhint: run the command again\r\n")
    # The fastest, so that a busy machine does not fail the test.
    assert min(waits) < 0.3, waits


def damaged(folder: Path, name: str, change: Callable[[bytes], bytes]) -> str:
    shutil.copytree(DEMO, folder)
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    return str(folder)


def config(**values: Any) -> Callable[[bytes], bytes]:
    return lambda raw: json.dumps({**json.loads(raw), **values}).encode()


def header(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes], bytes]:
    def apply(raw: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", raw)
        tensors = json.loads(raw[8 : 8 + length])
        change(tensors)
        text = json.dumps(tensors).encode()
        return struct.pack("<Q", len(text)) + text + raw[8 + length :]

    return apply


FINAL = "model.norm.weight"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("config.json", lambda raw: raw[:100], ["config.json"]),
        ("config.json", lambda _: b"[]", ["config.json"]),
        ("config.json", config(model_type="mixtral"), ["mixtral"]),
        ("config.json", config(num_hidden_layers=7), ["layers.6"]),
        ("config.json", config(num_hidden_layers=10**18), []),
        ("config.json", config(hidden_size=-1), ["hidden_size"]),
        ("config.json", config(vocab_size=9000), ["9000"]),
        ("config.json", config(quantization_config={"quant_method": "awq"}), ["quant"]),
        ("model.safetensors", lambda raw: raw[:-1], ["model.safetensors"]),
        ("model.safetensors", lambda raw: raw[:5], ["model.safetensors"]),
        ("model.safetensors", lambda raw: struct.pack("<Q", 10**13) + raw[8:], ["model.safetensors"]),
        ("model.safetensors", header(lambda t: t[FINAL].update(dtype="I8")), [FINAL]),
        ("model.safetensors", header(lambda t: t[FINAL].update(shape=[128])), [FINAL]),
        ("model.safetensors", header(lambda t: t.update({"other.weight": t.pop(FINAL)})), [FINAL]),
        ("model.safetensors", lambda raw: raw[:-2] + b"\xff\x7f", ["NaN"]),
    ],
)
def test_a_damaged_model_is_one_error(
    quantspec: Run, tmp_path: Path, name: str, change: Callable[[bytes], bytes], words: list[str]
) -> None:
    model = damaged(tmp_path / "model", name, change)
    quantspec("run", "--model", model, "--text", "x", "-n", "3").assert_error(1, *words)


def test_statistics_have_the_documented_names() -> None:
    engine = Engine.load(context=100)
    assert engine.statistics().keys() == Statistics.__annotations__.keys() - {"by_method"}
    assert engine.statistics()["acceptance_rate_per_position"] is None


@pytest.mark.slow
def test_threads_that_share_an_engine_get_what_each_gets_alone() -> None:
    engine = Engine.load(context=400, batch=2, gamma=3)
    prompts = ["It was a dark and stormy night", "The two men spoke in low voices"]
    alone = [engine.generate(prompt, max_new_tokens=150) for prompt in prompts]
    found: dict[str, Any] = {}
    together = threading.Barrier(2)

    def decode(prompt: str) -> None:
        together.wait()
        try:
            for _ in range(3):
                stream = engine.stream(prompt, max_new_tokens=150)
                text = "".join(stream)
                assert text == stream.generation.text
                found[prompt] = stream.generation
        except BaseException as error:
            found[prompt] = error

    threads = [threading.Thread(target=decode, args=(prompt,), daemon=True) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found.get(prompt) for prompt in prompts] == alone


def test_a_fork_gets_an_error_that_it_has_no_engine() -> None:
    program = """
import os
from quantspec_cli import Engine, QuantspecError
engine = Engine.load(context=100)
stream = engine.stream("x", max_new_tokens=50)
next(stream)
child = os.fork()
if child == 0:
    refused = 0
    for work in (lambda: engine.generate("x"), lambda: engine.stream("x"), lambda: next(stream)):
        try:
            work()
        except QuantspecError as error:
            refused += "fork" in error.message
    os._exit(refused)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
next(stream)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)


def test_a_missing_shard_is_one_error(quantspec: Run, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {FINAL: "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    quantspec("run", "--model", str(folder), "--text", "x").assert_error(1)


def test_a_model_beyond_memory_is_refused_with_numbers(quantspec: Run, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    path = folder / "config.json"
    # The cache of this many tokens needs 870 GB.
    path.write_bytes(config(max_position_embeddings=2**28)(path.read_bytes()))
    outcome = quantspec("run", "--model", str(folder), "--text", "x", "-n", str(2**28 - 10))
    outcome.assert_error(3, "GB", "longest context that fits")


def test_a_gpu_that_is_not_there_is_explained(quantspec: Run) -> None:
    if quantspec("doctor", "--json").json["gpu"]["available"]:
        assert quantspec("run", "--text", "x", "-n", "3", "--device", "cuda:0").code == 0
    else:
        quantspec("run", "--text", "x", "--device", "cuda:0").assert_error(1)
        quantspec("run", "--text", "x", "--device", "cuda:99").assert_error(1)


def test_a_forced_simd_path_this_processor_lacks_is_one_error(quantspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUANTSPEC_SIMD", "nonsense")
    quantspec("run", "--text", "x", "-n", "3").assert_error(2, "QUANTSPEC_SIMD", "nonsense", "avx2")
