"""`quantspec batch --ray`: documents of a dead worker are decoded elsewhere, and no answer depends on the cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Outcome

from quantspec_cli import hub
from quantspec_cli.cluster import Cluster, WorkerSpec
from quantspec_cli.options import EngineOptions

# A cluster of two nodes on this machine; the second is killed when the first documents are finished, while others wait.
DRIVER = """
import json, subprocess, sys, time
from pathlib import Path
from ray.cluster_utils import Cluster

docs, out, *flags = sys.argv[1:]
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = nodes.add_node(num_cpus=1)
nodes.wait_for_nodes()
options = [*flags, "--parallel", "2", "--device", "cpu", "--json", "--ray", nodes.address]
command = [sys.executable, "-m", "quantspec_cli", "batch", docs, "--out", out, "-m", "model", *options]
# The workers are in another folder.
batch = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(out).parent)
results = Path(out) / "results.jsonl"
done = lambda: len(results.read_bytes().splitlines()) if results.exists() else 0
while batch.poll() is None and not done():
    time.sleep(0.02)
nodes.remove_node(other, allow_graceful=False)
at_kill = done()
stdout, _ = batch.communicate(timeout=200)
nodes.shutdown()
print(json.dumps({"code": batch.returncode, "at_kill": at_kill, "report": json.loads(stdout)}))
"""


@pytest.mark.slow
def test_a_node_that_dies_loses_nothing(quantspec: Callable[..., Outcome], tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for number in range(24):
        (docs / f"{number}.txt").write_text(f"Chapter {number}. " + "It was a dark and stormy night. " * (1 + number))
    # Answered in parts.
    (docs / "long.txt").write_text("".join(f"It was night {number}, and the rain fell. " for number in range(700)))
    (tmp_path / "model").symlink_to(hub.demo())
    out = tmp_path / "cluster"
    flags = ["-n", "200", "-c", "1000", "--long", "map-reduce", "--instruction", "Go on.", "-t", "1", "--ignore-eos"]
    command = [sys.executable, "-c", DRIVER, str(docs), str(out), *flags]
    # Ray would send statistics about its use.
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    report = found["report"]
    assert (found["code"], report["done"], report["failed"]) == (0, 25, 0)
    assert 0 < found["at_kill"] < 25, "the node died when documents were under way"
    assert (report["stats"]["workers"], report["stats"]["workers_lost"]) == (2, 1)
    assert "documents per hour\nwarning: 1 of 2 workers of the Ray cluster died\n" in done.stderr
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert sorted(line["document"] for line in lines) == sorted(path.name for path in docs.iterdir()), "each once"
    alone = tmp_path / "alone"
    assert quantspec("batch", str(docs), "--out", str(alone), *flags).code == 0
    for path in docs.iterdir():
        assert (out / f"{path.name}.md").read_text() == (alone / f"{path.name}.md").read_text()


# A cluster of this machine alone, whose worker decodes one answer.
PROGRESS = """
import json, threading
from quantspec_cli import fingerprint
from quantspec_cli.batch_work import RunningCall
from quantspec_cli.cluster import Cluster, WorkerSpec
from quantspec_cli.engine import Engine
from quantspec_cli.model import Model
from quantspec_cli.options import EngineOptions, GenerateOptions

model = Model.open(None)
engine_options = EngineOptions(device="cpu", threads=1)
options = GenerateOptions(max_new_tokens=3000, ignore_eos=True)
prompt = model.prompt("It was a dark and stormy night. " * 20)
spec = WorkerSpec(
    model=None,
    revision=None,
    offline=True,
    fingerprint=fingerprint.of_model(model),
    options=engine_options,
    prompt_cache=None,
    context=3500,
    parallel=1,
)
cluster = Cluster("local", spec, lambda *_: None)
call, answers, seen = RunningCall(len(prompt.ids)), [], []
decode = lambda: answers.append(cluster.generate(call, prompt, options, threading.Event()))
thread = threading.Thread(target=decode)
thread.start()
while thread.is_alive():
    seen.append((call.stage, call.done))
    thread.join(0.05)
cluster.close()
with Engine(model, engine_options, context=3500) as engine:
    (alone,) = engine.start([prompt], options).finished()
print(json.dumps({"seen": seen, "equal": answers[0].tokens == alone.tokens}))
"""


@pytest.mark.slow
def test_a_call_on_a_worker_shows_its_progress() -> None:
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-c", PROGRESS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    tokens = [tokens for stage, tokens in found["seen"] if stage == "decoding"]
    assert tokens == sorted(tokens)
    assert len({number for number in tokens if 0 < number < 3000}) >= 2, found["seen"]
    assert found["equal"]


# A cluster with one GPU, or so it says, which another job holds until the batch says that it waits.
BUSY = """
import subprocess, sys
import ray
from ray.cluster_utils import Cluster

docs, out = sys.argv[1:]
nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1, "include_dashboard": False})
ray.init(address=nodes.address, log_to_driver=False)

class Job:
    def ready(self):
        return True

job = ray.remote(Job).options(num_gpus=1, num_cpus=0).remote()
ray.get(job.ready.remote())
program = "from quantspec_cli import cluster, __main__; cluster._PATIENCE_S = 1; __main__.main()"
command = [sys.executable, "-c", program, "batch", docs, "--out", out, "-n", "5", "--ray", nodes.address]
batch = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
for line in batch.stderr:
    print(line, end="")
    if line.startswith("waiting for "):
        ray.kill(job)
code = batch.wait(timeout=100)
ray.shutdown()
nodes.shutdown()
sys.exit(code)
"""


@pytest.mark.slow
def test_a_batch_says_that_it_waits_for_workers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A text.")
    command = [sys.executable, "-c", BUSY, str(tmp_path / "a.txt"), str(tmp_path / "out")]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert "waiting for 1 of 1 worker of the Ray cluster: " in done.stdout
    assert (tmp_path / "out/results.jsonl").read_text().count('"done"') == 1


def test_no_cluster_is_an_error_of_one_line(quantspec: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A text.")
    outcome = quantspec("batch", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--ray", "127.0.0.1:1")
    assert outcome.code == 1
    assert outcome.stderr.splitlines()[0].startswith("error: no Ray cluster at '127.0.0.1:1': connection refused")
    assert not (tmp_path / "out").exists(), "no document was counted"
    outcome = quantspec("batch", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--ray", "127.0.0.1:100000")
    outcome.assert_error(1, "no Ray cluster at '127.0.0.1:100000'")


@pytest.mark.parametrize("said", ["file", "environment"])
def test_a_cluster_that_has_ended_is_refused_at_once(
    quantspec: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """Ray itself would try to reach it for minutes."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if said == "file":
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray/ray_current_cluster").write_text("127.0.0.1:1\n")
    else:
        monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    (tmp_path / "a.txt").write_text("A text.")
    outcome = quantspec("batch", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--ray", "auto")
    outcome.assert_error(1, "no Ray cluster at '127.0.0.1:1'")


def test_an_interrupt_while_the_cluster_is_sought_restores_what_ray_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda *_: None)
        raise KeyboardInterrupt

    ended: list[bool] = []
    ray = SimpleNamespace(init=interrupt, shutdown=lambda: ended.append(True))
    monkeypatch.setitem(sys.modules, "ray", ray)
    before = sys.stdout, signal.getsignal(signal.SIGTERM)
    spec = WorkerSpec(
        model=None,
        revision=None,
        offline=True,
        fingerprint="",
        options=EngineOptions(),
        prompt_cache=None,
        context=100,
        parallel=1,
    )
    with pytest.raises(KeyboardInterrupt):
        Cluster("auto", spec, lambda *_: None)
    assert (sys.stdout, signal.getsignal(signal.SIGTERM)) == before
    assert ended == [True]


def test_without_ray_the_extra_is_named(
    fake: object, quantspec: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "a.txt").write_text("A text.")
    command = ["batch", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--ray"]
    outcome = quantspec(*command, "auto")
    assert (outcome.code, "pip install 'quantspec[ray]'" in outcome.stderr) == (2, True), outcome
    quantspec(*command, " ").assert_error(2, "--ray is empty")
    quantspec(*command, "auto", "--device", "cuda:1").assert_error(2, "--device is cuda:1")
