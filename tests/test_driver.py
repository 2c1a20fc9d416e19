"""Behaviour of the command line with a GPU driver, on machines without one.

fake_driver.c replaces the driver. Its kernels do nothing, so every token is 0.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Outcome

from quantspec_cli import _native

DOCUMENT = Path(__file__).parents[1] / "examples" / "dracula.txt"
DECODE = ("run", "--device", "cuda", "--prompt", str(DOCUMENT), "-n", "24")
# A fixed γ, so that every run makes the same calls: an automatic γ depends on measured times.
COUNTED = (*DECODE, "--gamma", "4")

pytestmark = pytest.mark.skipif(not _native.doctor()["kernels"], reason="this build has no GPU kernels")


@dataclass(frozen=True)
class Driver:
    """A folder with a libcuda.so.1 that precedes the system's."""

    folder: Path

    def environment(self, says: str = "", **more: str) -> dict[str, str]:
        report = str(self.folder / "report")
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.folder),
            "FAKE_CUDA": says,
            "FAKE_CUDA_REPORT": report,
            **more,
        }

    def __call__(self, *arguments: str, says: str = "", **environment: str) -> Outcome:
        command = [sys.executable, "-m", "quantspec_cli", *arguments]
        done = subprocess.run(
            command, env=self.environment(says, **environment), capture_output=True, text=True, check=False, timeout=60
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    def report(self) -> dict[str, int]:
        """Calls by name, and bytes held when the device was released."""
        lines = (self.folder / "report").read_text().split("\n")
        (self.folder / "report").unlink()
        return {line.rpartition(" ")[0].removeprefix("calls "): int(line.rpartition(" ")[2]) for line in lines if line}


def compiled(folder: Path, *flags: str) -> Driver:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler for a driver to test with")
    library, source = folder / "libcuda.so.1", Path(__file__).with_name("fake_driver.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", *flags, "-o", library, source], check=True)
    # One driver under both of its names, as on a real system, so that both have the same state.
    (folder / "libcuda.so").symlink_to(library.name)
    return Driver(folder)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return compiled(tmp_path_factory.mktemp("driver"))


def test_a_driver_that_works_is_used(driver: Driver) -> None:
    gpu = driver("doctor", "--json").json["gpu"]
    assert gpu["available"] is True
    assert gpu["devices"][0]["name"] == "Fake GPU"
    for device in ("cuda", "cuda:0", "auto"):
        found = driver(*DECODE, "--device", device, "--json").json
        assert found["device"] == "cuda:0"
        assert found["results"][0]["new_tokens"] == 24
        # Graphs were recorded, launched and freed with all memory.
        report = driver.report()
        assert report["cuGraphLaunch"] > 5
        assert report["held"] == 0


def test_a_batch_opens_the_device_for_its_plans_and_for_its_engine(driver: Driver, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(DOCUMENT.read_text()[: 2000 * (number + 1)])
    outcome = driver("batch", str(folder), "--out", str(tmp_path / "out"), "-n", "4", "--device", "cuda", "--json")
    assert (outcome.code, outcome.json["done"]) == (0, 5)
    report = driver.report()
    assert report["cuDevicePrimaryCtxRetain"] == 2
    assert report["held"] == 0


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--method", "ar"),
        ("--kv-target", "fp16"),
        ("--draft-weights", "int4-mlp"),
        ("--weights", "int8"),
        ("--weights", "int8", "--draft-weights", "int4-mlp"),
        ("--weights", "int4"),
        ("--gamma", "16"),
        ("--method", "ngram"),
        ("--method", "ngram", "--accept", "rejection", "--temperature", "1", "--gamma", "4"),
    ],
)
def test_memory_is_what_the_plan_says(driver: Driver, more: Sequence[str]) -> None:
    stats = driver(*DECODE, *more, "--json").json["stats"]
    assert 0.97 * stats["planned_bytes"] < stats["peak_bytes"] <= 1.05 * stats["planned_bytes"]
    assert driver.report()["held"] == 0


def test_a_known_prompt_is_copied_to_the_gpu(driver: Driver, tmp_path: Path) -> None:
    """Copies every layer's keys and values of the cached blocks; the memory of the first run suffices."""
    runs = [driver(*DECODE, "--prompt-cache", str(tmp_path / "prompts"), "--json").json for _ in range(2)]
    length = runs[0]["results"][0]["prompt_tokens"]
    assert [run["stats"]["reused_tokens"] for run in runs] == [0, (length - 1) // 128 * 128]
    assert runs[0]["results"] == runs[1]["results"]
    assert driver.report()["held"] == 0


@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "12.0", "13.0"])
def test_every_supported_gpu_is_served(driver: Driver, capability: str) -> None:
    """GPUs newer than the images use PTX. A development build may lack images."""
    major, minor = capability.split(".")
    outcome = driver(*DECODE, "--json", says=f"major={major} minor={minor}")
    if capability == "7.5" and not any(image.endswith("sm_75") for image in _native.doctor()["kernels"]):
        assert "compute capability 7.5, and this library was built without kernels for it" in outcome.stderr
    else:
        stats = outcome.json["stats"]
        assert 0.97 * stats["planned_bytes"] < stats["peak_bytes"] <= 1.05 * stats["planned_bytes"]
        assert driver.report()["held"] == 0


def test_weights_in_nibbles_have_no_copy_for_drafts(driver: Driver) -> None:
    def needs(weights: str) -> int:
        return int(driver(*DECODE, "--weights", weights, "--json").json["stats"]["planned_bytes"])

    assert needs("int4") < needs("int8") < needs("checkpoint")
    assert driver(*DECODE, "--weights", "auto", "--json").json["weights"] == "checkpoint"


def test_the_first_gpu_that_can_be_used_is_found(driver: Driver) -> None:
    says = "devices=3 major=6 others=9"
    report = driver("doctor", says=says).stdout
    assert (
        "GPU         cuda:0: Fake GPU, compute capability 6.0, 8.39 GB; not usable, there are no kernels for it\n"
        in report
    )
    assert "GPU         cuda:2: Fake GPU, compute capability 9.0, 8.39 GB\n" in report
    assert [device["usable"] for device in driver("doctor", "--json", says=says).json["gpu"]["devices"]] == [
        False,
        True,
        True,
    ]
    for device in ("auto", "cuda"):
        assert driver(*DECODE, "--device", device, "--json", says=says).json["device"] == "cuda:1"
    driver(*DECODE, "--device", "cuda:0", says=says).assert_error(1, "compute capability 6.0", "doctor lists")


# The driver's message, then quantspec's.
UNUSABLE = [
    ("version=11080", "supports CUDA 11.8, and 12.0 is needed", "525"),
    ("cuInit=1:100", "the driver shows no GPU", "nvidia-smi"),
    ("devices=0", "the driver shows no GPU", "nvidia-smi"),
    ("cuInit=1:999", "cuInit failed: CUDA_ERROR_UNKNOWN", "nvidia-smi"),
    ("major=7", "Fake GPU has compute capability 7.0, and kernels exist from 7.5 on", "--device cpu"),
]


@pytest.mark.parametrize(("says", "reason", "remedy"), UNUSABLE)
def test_a_driver_that_cannot_be_used_is_named(driver: Driver, says: str, reason: str, remedy: str) -> None:
    driver(*DECODE, says=says).assert_error(1, reason, remedy)
    gpu = driver("doctor", "--json", says=says).json["gpu"]
    assert gpu["available"] is False
    assert reason in gpu["reason"]
    # No GPU was requested.
    assert driver(*DECODE, "--device", "auto", "--json", says=says).json["device"] == "cpu"


def test_an_empty_list_of_visible_devices_is_named(driver: Driver) -> None:
    outcome = driver(*DECODE, says="cuInit=1:100", CUDA_VISIBLE_DEVICES="")
    outcome.assert_error(1, 'no GPU while CUDA_VISIBLE_DEVICES is ""', "unset CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("content", ["absent", "nonsense", "empty"])
def test_without_a_driver_the_reason_is_reported(tmp_path: Path, content: str) -> None:
    """`empty` is a library without the driver's functions. `absent` needs a machine without a driver."""
    if content == "absent":
        if _native.doctor()["gpu"]["devices"]:
            pytest.skip("this machine has a driver")
        driver = Driver(tmp_path)
    elif content == "nonsense":
        driver = Driver(tmp_path)
        (tmp_path / "libcuda.so.1").write_text("not a library")
    else:
        driver = compiled(tmp_path, "-DEMPTY")
    words = "libcuda.so.1 has no cuDriverGetVersion" if content == "empty" else "no NVIDIA driver: "
    driver(*DECODE).assert_error(1, words, "525")
    assert words in driver("doctor", "--json").json["gpu"]["reason"]


@pytest.mark.parametrize(("device", "devices"), [("cuda:7", "1"), ("cuda:2", "2")])
def test_a_device_that_does_not_exist_is_a_usage_error(driver: Driver, device: str, devices: str) -> None:
    outcome = driver(*DECODE, "--device", device, says=f"devices={devices}")
    outcome.assert_error(2, f"device {device} does not exist, the driver shows {devices}", "doctor")


def test_a_gpu_has_no_ablations(driver: Driver) -> None:
    for flags in (("--group", "64"), ("--kv-rounding", "truncate")):
        command = ("eval", "--tokens", "30", *flags)
        driver(*command).assert_error(2, "cuda:0 reads no cache with other groups", "--device cpu")
        assert driver(*command, "--device", "cpu").code == 0
    single = ("eval", "--tokens", "30", "--sensitivity-layers")
    driver(*single).assert_error(2, "cuda:0 scores kinds of matrices", "--device cpu")


def test_a_gpu_in_exclusive_use_is_named(driver: Driver) -> None:
    driver(*DECODE, says="busy=1").assert_error(1, "CUDA_ERROR_DEVICE_UNAVAILABLE", "to itself")
    # No device was named, so another GPU is used; the CPU would be far slower.
    assert driver(*DECODE, "--device", "auto", "--json", says="devices=3 busy=3").json["device"] == "cuda:2"
    driver(*DECODE, "--device", "auto", says="devices=2 busy=3").assert_error(1, "CUDA_ERROR_DEVICE_UNAVAILABLE")
    driver(*DECODE, says="cuDevicePrimaryCtxRetain=1:2").assert_error(3, "out of memory")


def test_a_context_that_does_not_fit_is_refused_with_the_longest_one(driver: Driver) -> None:
    outcome = driver(*DECODE, says="free=60")
    outcome.assert_error(3, "cuda:0 memory needed", "the longest context that fits is")
    # Nothing was allocated for it, so the hint can be followed.
    longest = int(outcome.stderr.split("fits is ")[1].split()[0])
    assert driver.report().get("cuMemAlloc", 0) == 0
    shorter = DOCUMENT.read_text(encoding="utf-8")[: longest * 2]
    found = driver("run", "--device", "cuda", "--text", shorter, "-n", "8", "--json", says="free=60").json
    assert found["results"][0]["prompt_tokens"] + 8 <= longest
    driver.report()


@pytest.mark.slow
def test_memory_is_freed_after_an_allocation_fails(driver: Driver) -> None:
    """Another program takes memory after the plan was made: failure at every seventh allocation of either kind."""
    driver(*COUNTED)
    calls = driver.report()
    for call in ("cuMemAlloc", "cuMemHostAlloc"):
        for at in {1, 2, *range(3, calls[call], 7), calls[call]}:
            outcome = driver(*COUNTED, says=f"{call}={at}:2")
            outcome.assert_error(3, "hint: ")
            assert driver.report()["held"] == 0, (call, at)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("cuLaunchKernelEx", "launching "),
        ("cuGraphLaunch", "launching recorded steps: CUDA_ERROR_ILLEGAL_ADDRESS"),
        ("cuStreamSynchronize", " queued"),
        ("cuModuleLoadData", "loading "),
    ],
)
def test_a_device_that_fails_is_named_and_the_text_is_kept(driver: Driver, call: str, words: str) -> None:
    driver(*COUNTED, "--json")
    last = driver.report()[call]
    for at in sorted({1, last // 4, last // 2, 7 * last // 8} - {0}):
        outcome = driver(*COUNTED, "--json", says=f"{call}={at}:700")
        found = json.loads(outcome.stdout)
        assert outcome.code == found["error"]["exit_code"] == 1
        assert found["error"]["kind"] == "device"
        assert words in found["error"]["message"]
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in found["error"]["message"]
        assert [line.partition(":")[0] for line in outcome.stderr.splitlines()] == ["error", "hint"]
        assert driver.report()["held"] == 0, at
    if call == "cuGraphLaunch":
        # The last one failed after half of the tokens.
        (result,) = found["results"]
        assert len(result["tokens"]) == result["new_tokens"] > 8
        assert result["stop_reason"] == "interrupted"


def test_a_kernel_that_fails_can_be_named(driver: Driver) -> None:
    """A kernel's error appears at the next wait, which may be a round later; waiting after every kernel identifies it."""
    waits = "CUDA_LAUNCH_BLOCKING"
    driver(*COUNTED)
    usual = driver.report()
    driver(*COUNTED, **{waits: "1"})
    blocking = driver.report()
    assert "cuGraphLaunch" not in blocking
    assert blocking["cuStreamSynchronize"] > blocking["cuLaunchKernelEx"] > usual["cuLaunchKernelEx"]
    says = f"cuStreamSynchronize={blocking['cuStreamSynchronize'] - 40}:700"
    outcome = driver(*COUNTED, "--json", says=says, **{waits: "1"})
    assert re.match(r"error: kernel [a-z0-9_]+ of \d+ × \d+ × \d+ blocks failed: CUDA_ERROR_ILL", outcome.stderr)
    assert waits not in outcome.stderr
    assert len(json.loads(outcome.stdout)["results"][0]["tokens"]) > 8
    assert driver.report()["held"] == 0
    # The remedy in the error without that wait.
    outcome = driver(*COUNTED, says=f"cuStreamSynchronize={7 * usual['cuStreamSynchronize'] // 8}:700")
    assert re.search(rf"^hint: .*{waits}=1", outcome.stderr, re.M)
    driver.report()


@pytest.mark.parametrize(("waits", "letter"), [(5, "w"), (35, "w"), (50, "g")])
def test_ctrl_c_ends_work_on_a_gpu(driver: Driver, waits: int, letter: str) -> None:
    """After this many delayed waits: "w" before the first graph launch (80 in all), "g" after it (400)."""
    report = driver.folder / "report"
    report.write_text("")
    command = [sys.executable, "-m", "quantspec_cli", *COUNTED, "-n", "400", "--json"]
    child = subprocess.Popen(
        command, env=driver.environment("delay=20"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while report.read_text().count(letter) < waits:
        assert child.poll() is None
        time.sleep(0.005)
    child.send_signal(signal.SIGINT)
    sent = time.monotonic()
    out, _ = child.communicate(timeout=30)
    # More than a busy machine needs to end a process, less than the remaining work.
    assert time.monotonic() - sent < 4
    assert child.returncode == 130
    found = json.loads(out)
    if letter == "g":
        assert found["results"][0]["stop_reason"] == "interrupted"
    else:
        assert found["error"]["kind"] == "interrupted"
    assert driver.report()["held"] == 0
