"""Run a function on N ranks, each a fresh process, from inside a test.

Ranks are forked from a process of the test's module (templates.py) and join a process group. One
that raises, dies or outlives the timeout fails the call by a `RankError`. No process outlives it.
    results = run_ranks(body, 4, 128)  # body(rank, world_size, 128) at module level; results[rank]
    @on_ranks(4)                       # a test that runs on every rank, test(rank, world_size)
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.templates import Template, template_for

_UNPATCHED = "tests.support.before_patches"  # looks at Megatron before it imports the package
_choosing = threading.Lock()
HANG_S = 1200.0  # a rank that has not ended by then hangs, however busy the machine is
_GRACE_S = 5.0  # after one rank failed, the others get this long to fail by themselves and say why


@dataclasses.dataclass
class RankOutcome:
    """What became of one rank: a value, or an error (a traceback or a description), or neither if
    it was killed."""

    rank: int
    value: Any = None
    error: str | None = None
    exitcode: int | None = None
    stacks: str = ""
    finished: bool = False
    failed_at: float | None = None

    @property
    def ok(self) -> bool:
        return self.finished and self.error is None


class RankError(AssertionError):
    """At least one rank did not return. ``outcomes`` holds every rank's, in rank order."""

    def __init__(self, message: str, outcomes: Sequence[RankOutcome]) -> None:
        super().__init__(message)
        self.outcomes = list(outcomes)


def world_group() -> dist.ProcessGroup:
    """The group of all ranks, as a body of `run_ranks` needs it."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = HANG_S,
    backend: str = "gloo", env: Mapping[str, str] | None = None,
) -> list[Any]:  # fmt: skip
    """The results of ``fn(rank, world_size, *args)`` by rank; RankError where one fails or hangs.

    Args:
        fn: a module-level function; it and its arguments and results must be picklable.
        timeout_s: from the last rank's start, and the process group's timeout.
        backend: "gloo" (its ranks see no GPU), "nccl" (rank r takes GPU r; where there are fewer
            GPUs, ranks share them and use gloo), or "": `fn` makes a group itself, or none.
        env: environment variables set before `fn` is imported (but after the server's modules).
    """
    outcomes = run_ranks_outcomes(
        fn, world_size, *args, timeout_s=timeout_s, backend=backend, env=env
    )
    failed = [outcome for outcome in outcomes if not outcome.ok]
    if failed:
        raise RankError(_describe(fn, world_size, failed), outcomes)
    return [outcome.value for outcome in outcomes]


def on_ranks(
    world_size: int | None = None, **options: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on `world_size` ranks. It takes its rank, their number, then its own parameters,
    picklable. Without `world_size` it is parametrised by it. `options`: of run_ranks."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        _, ranks, *taken = inspect.signature(body).parameters.values()

        @functools.wraps(body)
        def test(**parameters: Any) -> None:
            size = parameters.pop(ranks.name) if world_size is None else world_size
            run_ranks(body, size, *(parameters[each.name] for each in taken), **options)

        named = [ranks, *taken] if world_size is None else taken
        test.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        # Functions travel to ranks by name, and the test has taken this one's.
        body.__name__ = body.__qualname__ = f"on_a_rank_{body.__name__}"
        body.__globals__[body.__name__] = body  # type: ignore[attr-defined]
        return pytest.mark.world(test)

    return decorate


def run_ranks_outcomes(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = HANG_S,
    backend: str = "gloo", env: Mapping[str, str] | None = None, grace_s: float = _GRACE_S,
    awaited: Sequence[int] | None = None,
) -> list[RankOutcome]:  # fmt: skip
    """As `run_ranks`, for tests in which ranks are meant to fail: never raises for what a rank did.

    Once one rank has failed, the others have `grace_s` seconds to end before they are killed, but
    `timeout_s` after an ``os._exit(0)``. What `awaited` leaves out is killed once those have ended.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; it must be at least 1")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        # The parent holds the store and listens on a port that the system picked: nothing to race
        # for.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = _Job(world_size, store.port, backend, timeout_s, dict(env or {}), folder)
        template = _template(fn, job)
        # Loaded only after the rank's environment is set.
        payload = pickle.dumps((_importable(fn), args))
        ranks = [_Rank(template, job, payload, rank) for rank in range(world_size)]
        # The first call's wait for the server does not count.
        deadline = time.monotonic() + timeout_s
        try:
            chosen = [rank for i, rank in enumerate(ranks) if awaited is None or i in awaited]
            _wait_for_all(chosen, deadline, grace_s)
        finally:
            for rank in ranks:
                rank.stop(Path(folder))
        del store
    return [rank.outcome for rank in ranks]


@dataclasses.dataclass(frozen=True)
class _Job:
    world_size: int
    port: int
    backend: str
    timeout_s: float
    env: dict[str, str]
    folder: str


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, template: Template, job: _Job, payload: bytes, rank: int) -> None:
        self.outcome = RankOutcome(rank)
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        self.process = template.fork(_rank_main, (rank, job, payload), theirs)
        theirs.close()

    def receive(self) -> None:
        """Take the rank's report, or note that it ended without one."""
        outcome = self.outcome
        try:
            outcome.error, outcome.value, ended_at = pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join(_GRACE_S)
            ended_at = time.monotonic()
            outcome.error = f"the process ended without a result, exit code {self.process.exitcode}"
        outcome.finished = True
        if outcome.error is not None:
            outcome.failed_at = ended_at

    def stop(self, folder: Path) -> None:
        """End the process; one that has not reported is first asked where its threads stand."""
        stacks = folder / f"stacks-{self.outcome.rank}"
        if self.outcome.finished:
            self.process.join(_GRACE_S)
        elif stacks.exists() and self.process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it may end at this very moment
                os.kill(self.process.pid, signal.SIGUSR1)
            for _ in range(10):  # until it has written all of them, if it runs
                before = stacks.stat().st_size
                time.sleep(0.2)
                if 0 < before == stacks.stat().st_size:
                    break
            self.outcome.stacks = stacks.read_text(errors="replace")
        self.process.kill()
        self.process.join()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # children that it left behind
        self.outcome.exitcode = self.process.exitcode
        self.pipe.close()


def _wait_for_all(ranks: Sequence[_Rank], deadline: float, grace_s: float) -> None:
    """Collect reports until all ranks gave theirs, the deadline or a failure's grace is over."""
    waiting: dict[Any, _Rank] = {rank.pipe: rank for rank in ranks}
    while waiting:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        for pipe in multiprocessing.connection.wait(list(waiting), timeout=remaining):
            rank = waiting.pop(pipe)
            rank.receive()
            if rank.outcome.failed_at is not None and rank.process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + grace_s)


def _rank_main(
    rank: int, job: _Job, payload: bytes, pipe: multiprocessing.connection.Connection
) -> None:
    """A forked rank's life: environment, process group, the function, the report."""
    os.setsid()  # its children (data loaders, checkpoint writers) end with it: see `stop`
    stacks = open(Path(job.folder) / f"stacks-{rank}", "w")  # noqa: SIM115 (lives as long as the process)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    world_size, port = str(job.world_size), str(job.port)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    # A program that calls init_process_group itself meets the others at the parent's store, as
    # under torchrun.
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    os.environ.update(job.env)  # once more: a test may set what is set above
    torch.set_num_threads(1)
    # Written in this process all the same; Megatron's own queue starts an interpreter a rank, which
    # imports the program once more: ten seconds.
    saving = sys.modules.get("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if saving is not None:
        saving._results_queue = queue.Queue()  # type: ignore[attr-defined]
    error: str | None = None
    value: Any = None
    try:
        if job.backend:
            _join(rank, job)
        fn, args = pickle.loads(payload)
        value = fn(rank, job.world_size, *args)
    except BaseException as failure:  # noqa: BLE001 (whatever ended the function is reported)
        error = traceback.format_exc()
        held = failure  # noqa: F841 (after an error of CUDA, letting go of the tensors of its frames ends the process unheard)
    ended_at = time.monotonic()  # reports may be read in another order
    try:
        # Not pipe.send: torch would share tensors through this process, which ends.
        report = pickle.dumps((error, value, ended_at))
    except Exception:  # noqa: BLE001 (pickling errors have many types)
        unsent = f"the result of rank {rank} could not be sent:\n{traceback.format_exc()}"
        report = pickle.dumps((unsent, None, ended_at))
    pipe.send_bytes(report)
    if error is None and dist.is_initialized():
        # Nobody closes a connection that another still reads from.
        with contextlib.suppress(Exception):
            dist.barrier()
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if error is None else 1)  # a failed collective may leave threads that never join


def _join(rank: int, job: _Job) -> None:
    timeout = datetime.timedelta(seconds=job.timeout_s)
    backend = take_gpu(rank, job.world_size) if job.backend == "nccl" else job.backend
    store = dist.TCPStore("127.0.0.1", job.port, is_master=False, timeout=timeout)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=job.world_size, timeout=timeout
    )


def take_gpu(local_rank: int, ranks: int) -> str:
    """Set this rank's GPU. Returns the backend for `ranks` of a host: NCCL wants a GPU for each."""
    gpus = torch.cuda.device_count()
    torch.cuda.set_device(local_rank % gpus)
    if ranks <= gpus:
        return "nccl"
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return "gloo"


def _importable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` by its module's own name, where that runs as the main program (python -m)."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if getattr(fn, "__module__", "") != "__main__" or spec is None:
        return fn
    own: Callable[..., Any] = getattr(importlib.import_module(spec.name), fn.__qualname__)
    return own


def _template(fn: Callable[..., Any], job: _Job) -> Template:
    """What the ranks of a job are forked from."""
    env = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    if "GLOO_SOCKET_IFNAME" in os.environ:
        env.clear()
    if job.backend == "gloo":
        # Ranks choose alike on every machine. CUDA is asked only after this.
        env["CUDA_VISIBLE_DEVICES"] = ""
    env |= job.env
    # A process that has used CUDA must not be forked: ranks with a GPU import everything
    # themselves.
    forkable = env.get("CUDA_VISIBLE_DEVICES") == "" or not os.path.exists("/dev/nvidiactl")
    module = getattr(fn, "__module__", "") if forkable else ""
    changed = dict(job.env.items() - os.environ.items())
    bare = bool(changed.keys() - {"CUDA_VISIBLE_DEVICES"}) or module in ("", "__main__", _UNPATCHED)
    with _choosing:  # worlds may be started by several threads
        return template_for("" if module == "__main__" else module, frozenset(env.items()), bare)


def _describe(fn: Callable[..., Any], world_size: int, failed: Sequence[RankOutcome]) -> str:
    lines = [f"{fn.__qualname__}: {len(failed)} of {world_size} ranks failed"]
    # The first failure comes first: the others are mostly its effects.
    for outcome in sorted(failed, key=lambda o: o.failed_at or float("inf")):
        if outcome.error is not None:
            lines.append(f"--- rank {outcome.rank} ---\n{outcome.error.rstrip()}")
        else:
            lines.append(
                f"--- rank {outcome.rank} did not finish; it stood at "
                f"---\n{outcome.stacks.rstrip()}"
            )
    return "\n".join(lines)
