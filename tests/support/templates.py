"""A template is a process that has imported a test's module; the test's ranks are forked from it.

A template is itself forked from one that has imported third parties or, unless the environment is
to change before, from one that has also imported megatron_fluid, which takes the longest.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from typing import Any

_POLL_S = 0.005
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>
_THIRD_PARTIES = [
    *("torch.distributed.nn", "torch.distributed._symmetric_memory", "torch._dynamo"),
    *("hypothesis", "pytest", "triton.language", "wrapt"),
]
# With a GPU, Megatron's imports may create a CUDA context, which a fork must not inherit: ranks
# import it themselves.
if not os.path.exists("/dev/nvidiactl"):
    _THIRD_PARTIES += [
        *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.gpt.gpt_model"),
        *("megatron.core.distributed", "megatron.core.optimizer"),
        "megatron.core.pipeline_parallel",
        "megatron.core.tokenizers.text",  # imports transformers: half of a short training's time
        "megatron.training.training",
    ]
if os.environ.get("TRITON_INTERPRET") == "1":
    _THIRD_PARTIES.append("tests.support.interpreter")


class ForkedProcess:
    """A process that a template forked, with the part of multiprocessing.Process's interface that
    the launcher uses."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid, self.exitcode = pid, None
        self._template = template

    exitcode: int | None

    def is_alive(self) -> bool:
        if self.exitcode is None:
            self.exitcode = self._template.exit_code(self.pid)
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until it ended, at most `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (deadline is None or time.monotonic() < deadline):
            time.sleep(_POLL_S)

    def kill(self) -> None:
        if self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Template:
    """The pytest process's end of a template, which ends with this object, as do all its forks.
    Several threads may ask at a time. It is forked from `start` (None: a new interpreter), has the
    environment `env` and imports `modules`; what cannot be imported fails the forked process.
    """

    def __init__(
        self, start: Template | None, modules: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self._lock = threading.Lock()  # of a request and its answer
        self._socket, theirs = multiprocessing.Pipe(duplex=True)
        if start is not None:
            start.fork(_template_main, (modules, dict(env)), theirs)
        else:
            code = f"import sys; sys.path[:] = {sys.path!r}; from tests.support import templates; "
            code += f"templates._interpreter_main({modules!r}, {dict(env)!r}, {theirs.fileno()})"
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        theirs.close()

    def fork(
        self, target: Callable[..., None], args: tuple[Any, ...],
        pipe: multiprocessing.connection.Connection,
    ) -> ForkedProcess:  # fmt: skip
        """Run ``target(*args, pipe)`` in a process forked from the template. It must not return."""
        with self._lock:
            self._socket.send(("fork", pickle.dumps((target, args))))
            reduction.send_handle(self._socket, pipe.fileno(), 0)
            return ForkedProcess(self, self._socket.recv())

    def exit_code(self, pid: int) -> int | None:
        """A forked process's exit code (minus the signal that ended it), None while it runs."""
        with self._lock:
            self._socket.send(("poll", pid))
            return self._socket.recv()


@functools.cache
def with_torch() -> Template:
    """A template that has imported torch."""
    return Template(None, ["torch.distributed"], {})


@functools.cache
def _third_parties() -> Template:
    return Template(with_torch(), _THIRD_PARTIES, {"OMP_NUM_THREADS": "1"})


@functools.cache
def _with_the_package() -> Template:
    return Template(_third_parties(), ["megatron_fluid"], {})


@functools.lru_cache(maxsize=3)  # each holds what its module imported
def template_for(module: str, env: frozenset[tuple[str, str]], bare: bool) -> Template:
    """The template of a module and environment. bare: it must not have imported megatron_fluid
    before that module."""
    start = _third_parties() if bare else _with_the_package()
    return Template(start, [module] if module else [], dict(env))


def _interpreter_main(modules: Sequence[str], env: Mapping[str, str], handle: int) -> None:
    _template_main(modules, env, multiprocessing.connection.Connection(handle))


def _template_main(
    modules: Sequence[str], env: Mapping[str, str], socket: multiprocessing.connection.Connection
) -> None:
    """Fork on request until nobody holds the other end."""
    os.environ.update(env)
    gc.disable()  # it would look again and again at what imports keep
    for module in modules:
        with contextlib.suppress(Exception):  # the rank that needs it says why
            importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # no rank's collector copies these pages
    exit_codes: dict[int, int] = {}
    while True:
        try:
            request, content = socket.recv()
        except (EOFError, ConnectionError):
            os._exit(0)
        if request == "poll":
            if content not in exit_codes:
                pid, status = os.waitpid(content, os.WNOHANG)
                if pid:
                    exit_codes[content] = os.waitstatus_to_exitcode(status)
            socket.send(exit_codes.get(content))
            continue
        handle = reduction.recv_handle(socket)
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            socket.close()
            _run(content, handle)
        os.close(handle)
        socket.send(pid)


def _run(payload: bytes, handle: int) -> None:
    try:
        if sys.platform == "linux":  # this process ends when its template does, however that ends
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        target, args = pickle.loads(payload)
        target(*args, multiprocessing.connection.Connection(handle))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # reached only where the target returned or raised: it ends the process itself
