"""`quantspec batch --ray`: documents decode on a Ray cluster, with one engine per GPU, or per node without GPUs.

The driver reads documents, keeps the journal and writes the answers; a worker converts token ids to an answer. So a lost
worker costs only time: its documents are decoded again elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import fingerprint
from .batch_work import RunningCall
from .engine import Engine
from .errors import DeviceError, DoesNotFitError, ModelError, QuantspecError, UsageError, internal, reason
from .model import Model, planned
from .slots import PARALLEL, BeyondMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .generation import Generation
    from .model import Prompt
    from .options import EngineOptions, GenerateOptions

# Interval at which a thread that waits for an answer checks if the batch is to end, in seconds.
_LOOK_S = 0.2
# Time limit for a cluster to respond, in seconds.
_ANSWER_S = 10.0
# Time after which a caller hears of workers that have not begun, in seconds.
_PATIENCE_S = 20.0
# Workers that may die with one document. After that the document is the likely cause, and is not retried.
_DEATHS_OF_ONE = 2


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker must load.

    Attributes:
        fingerprint: of the driver's model; a worker with another one is refused.
        context: tokens of the longest sequence, if a worker's memory allows it.
        parallel: most concurrent sequences of a worker; None chooses.
    """

    model: str | None
    revision: str | None
    offline: bool
    fingerprint: str
    options: EngineOptions
    prompt_cache: str | None
    context: int
    parallel: int | None


class Worker:
    """An engine in a process of the cluster."""

    def __init__(self, spec: WorkerSpec) -> None:
        model = Model.open(spec.model, revision=spec.revision, offline=spec.offline)
        if fingerprint.of_model(model) != spec.fingerprint:
            raise ModelError(
                f"a worker's model {model.directory} is not the one that the batch was started with",
                "give all nodes the same files, or name a revision of a hub id",
            )
        plan = planned(model, spec.options, context=spec.context)
        self._context = spec.context if plan["fits"] else max(1, min(spec.context, plan["longest_context"]))
        self._parallel = spec.parallel or PARALLEL[plan["device"].partition(":")[0]]
        while (
            self._parallel > 1 and not planned(model, spec.options, context=self._context, batch=self._parallel)["fits"]
        ):
            self._parallel -= 1
        self._engine = Engine(
            model,
            spec.options,
            context=self._context,
            batch=self._parallel,
            prompt_cache=spec.prompt_cache or True,
        )
        self._calls: dict[int, RunningCall] = {}

    def room(self) -> tuple[int, int]:
        """Tokens of a sequence, and concurrent sequences."""
        return self._context, self._parallel

    def generate(self, number: int, prompt: Prompt, options: GenerateOptions) -> Generation:
        """One answer; calls share the engine's rounds. `number` is one that no other call has."""
        call = self._calls[number] = RunningCall(len(prompt.ids))
        try:
            return call.decode(self._engine, prompt, options)
        finally:
            del self._calls[number]

    def progress(self, number: int) -> tuple[str, int, int, float] | None:
        """Stage, done and total of a call (`RunningCall`), and the engine's `prompt_share`; None if the call has not begun or
        is complete.
        """
        call = self._calls.get(number)
        return None if call is None else (call.stage, call.done, call.total, self._engine.prompt_share)


@dataclass(eq=False)
class _WorkerHandle:
    """The driver's handle of a worker."""

    actor: Any
    context: int
    free: int


class Cluster:
    """The workers of a Ray cluster.

    Attributes:
        workers: engines that started.
        parallel: concurrent sequences over all workers.
        context: tokens of the longest sequence that any worker holds.
        lost: workers that died.
        failure: why a worker could not start, if another one could.
        prompt_share: `Engine.prompt_share` of the worker that last reported it.
    """

    def __init__(self, address: str, spec: WorkerSpec, on_waiting: Callable[[int, int], None]) -> None:
        """Starts a worker on every GPU, or node, and waits until each has loaded its model.

        Args:
            on_waiting: called once if that takes long, with the number of workers that have not begun, and of all: other jobs
                may hold their GPUs.

        Raises:
            UsageError: Ray is not installed.
            DeviceError: the cluster does not exist, or no worker could be started on it.
            QuantspecError: a worker's error about the model.
        """
        self._ray = ray = _package()
        # Standard output is reserved for the report; Ray would print messages about its nodes there.
        self._redirects = contextlib.ExitStack()
        devnull = self._redirects.enter_context(Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        self._redirects.enter_context(contextlib.redirect_stdout(devnull))
        try:
            with _own_handler():
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError) as error:
            self._redirects.close()
            raise _absent(address, error) from error
        except BaseException:  # Ctrl-C
            self._shut_down()
            raise
        self.lost = 0
        self.prompt_share = 0.0
        self.failure: QuantspecError | None = None
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        try:
            self._handles = self._started(spec, on_waiting)
        except BaseException:
            self._shut_down()
            raise
        self.workers = len(self._handles)
        self.parallel = sum(handle.free for handle in self._handles)
        self.context = max(handle.context for handle in self._handles)

    def _started(self, spec: WorkerSpec, on_waiting: Callable[[int, int], None]) -> list[_WorkerHandle]:
        ray = self._ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = ray.remote(Worker)
        # A worker's answers use this many threads, and its other calls one more.
        threads = (spec.parallel or max(PARALLEL.values())) + 1
        actors = []
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            gpus = 0 if spec.options.device == "cpu" else int(node["Resources"].get("GPU", 0))
            for _ in range(max(1, gpus)):
                there = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
                actor = remote.options(
                    num_gpus=min(1, gpus), num_cpus=0, scheduling_strategy=there, max_concurrency=threads
                )
                actors.append(actor.remote(spec))
        if not actors:
            raise DeviceError("the Ray cluster has no node", "start one with: ray start")
        rooms = {actor.room.remote(): actor for actor in actors}
        _, waiting = ray.wait(list(rooms), num_returns=len(rooms), timeout=_PATIENCE_S)
        if waiting:
            on_waiting(len(waiting), len(rooms))
        handles: list[_WorkerHandle] = []
        for room, actor in rooms.items():
            try:
                context, parallel = ray.get(room)
            except ray.exceptions.RayError as error:
                self.failure = _cause(error) or DeviceError(
                    "a worker of the Ray cluster died as it began", "see the logs of its nodes (ray logs)"
                )
            else:
                handles.append(_WorkerHandle(actor, context, parallel))
        if self.failure is not None and (isinstance(self.failure, ModelError) or not handles):
            raise self.failure
        return handles

    def generate(
        self, call: RunningCall, prompt: Prompt, options: GenerateOptions, stopping: threading.Event
    ) -> Generation:
        """One answer from any worker with room; if the worker dies, from another one. `call` shows its progress.

        Raises:
            DoesNotFitError: workers died while they decoded it.
            BeyondMemoryError: no worker holds so long a sequence.
            DeviceError: no worker is left.
            KeyboardInterrupt: the batch is to end.
        """
        ray = self._ray
        deaths = 0
        while True:
            handle = self._acquire(prompt, len(prompt.ids) + options.max_new_tokens, stopping)
            number, progress = next(self._numbers), None
            reference = handle.actor.generate.remote(number, prompt, options)
            dead = False
            try:
                while not ray.wait([reference], timeout=_LOOK_S)[0]:
                    if stopping.is_set():
                        raise KeyboardInterrupt
                    # Awaited only when it is ready, so that a slow worker delays nothing.
                    if progress is None:
                        progress = handle.actor.progress.remote(number)
                    elif ray.wait([progress], timeout=0)[0]:
                        if (found := ray.get(progress)) is not None:
                            call.stage, call.done, call.total, self.prompt_share = found
                        progress = None
                generation: Generation = ray.get(reference)
            except ray.exceptions.RayError as error:
                cause = _cause(error)
                if cause is not None:
                    raise cause from error
                dead = True
            else:
                return generation
            finally:
                self._release(handle, dead=dead)
            call.stage, call.done, call.total = "waiting", 0, 0
            deaths += 1
            if deaths >= _DEATHS_OF_ONE:
                raise DoesNotFitError(
                    f"{deaths} workers died while they decoded {prompt.name}",
                    "check the memory of the nodes; --retry-failed tries the document again",
                )

    def _acquire(self, prompt: Prompt, needed: int, stopping: threading.Event) -> _WorkerHandle:
        """Takes a free place of the worker with the most of them."""
        with self._changed:
            while not stopping.is_set():
                if not self._handles:
                    raise DeviceError(
                        f"all {self.lost} workers of the Ray cluster died",
                        "check its nodes, and run the command again",
                    )
                large = [handle for handle in self._handles if handle.context >= needed]
                if not large:
                    longest = max(handle.context for handle in self._handles)
                    raise BeyondMemoryError(
                        f"{prompt.name} and its answer need {needed} tokens; {longest} fit into a worker's memory",
                        "add a node with more memory, or use --long map-reduce",
                    )
                handle = max(large, key=lambda handle: handle.free)
                if handle.free:
                    handle.free -= 1
                    return handle
                self._changed.wait(_LOOK_S)
        raise KeyboardInterrupt

    def _release(self, handle: _WorkerHandle, *, dead: bool) -> None:
        with self._changed:
            handle.free += 1
            if dead and handle in self._handles:
                self._handles.remove(handle)
                self.lost += 1
            self._changed.notify_all()

    def statistics(self) -> dict[str, Any]:
        """For the report: workers, and those that died."""
        return {"workers": self.workers, "workers_lost": self.lost}

    def close(self) -> None:
        """Ends the workers and disconnects from the cluster."""
        for handle in self._handles:
            self._ray.kill(handle.actor)
        self._shut_down()

    def _shut_down(self) -> None:
        self._ray.shutdown()
        self._redirects.close()


@contextlib.contextmanager
def _own_handler() -> Iterator[None]:
    """Keeps the handler of SIGTERM, which Ray replaces by an exit without a report."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def check_cluster(address: str) -> None:
    """Refuses a HOST:PORT where nothing answers, before any document is read. Ray itself retries for minutes. "auto" may be
    the address of a cluster that has ended.

    Raises:
        UsageError: Ray is not installed.
        DeviceError: nothing answers.
    """
    _package()
    if address == "auto":
        address = _last_address() or address
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit() and "/" not in host:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S):
                pass
        except (OSError, OverflowError) as error:  # the latter for a port beyond 65535
            raise _absent(address, error) from error


def _last_address() -> str | None:
    """The address that "auto" stands for: of the environment, else of the cluster that began last on this machine. None if
    there is none: then Ray names the reason.
    """
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with contextlib.suppress(OSError, ValueError):
        return os.environ.get("RAY_ADDRESS") or Path(folder, "ray", "ray_current_cluster").read_text("utf-8").strip()
    return None


def _package() -> Any:
    """The module of Ray."""
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--ray needs the package ray", "install it with: pip install 'quantspec[ray]'", option="ray"
        ) from error
    return ray


def _absent(address: str, error: Exception) -> DeviceError:
    why = reason(error) if isinstance(error, OSError) else error
    return DeviceError(
        f"no Ray cluster at {address!r:.100}: {why}"[:300], "start one with: ray start --head, or correct --ray"
    )


def _cause(error: Any) -> QuantspecError | None:
    """A worker's exception; None if the worker itself is gone."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, QuantspecError):
        return cause
    return internal(cause) if isinstance(cause, Exception) else None
