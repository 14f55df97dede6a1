"""A template is a process that has imported a test's module; the test's ranks are forked from it.

The ranks of one module then share what was imported, copy-on-write, and nothing else: each is a
process of its own that no test has used before. A template runs no test code beyond the import.

Templates themselves are forked from one that has imported third parties alone (rank_server.py) or,
unless the environment is to change before, from one that has imported megatron_fluid, too, and
armed its patches, which takes longer than all other imports of a test.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing import reduction, spawn
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["ForkedProcess", "Template", "die_with_parent", "template_for"]

_KEPT = 3  # templates of one pytest process: each holds what its module imported
_POLL_S = 0.005
_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


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
    """The pytest process's end of a template.

    Args:
        start: what it is forked from; None for multiprocessing's server, which has imported torch.
        module: imported before any fork, unless empty. A module that cannot be imported fails the
            forked process, which imports it again.
        env: the environment variables that are set before the import.

    Several threads may ask at a time.
    """

    def __init__(self, start: Template | None, module: str, env: Mapping[str, str]) -> None:
        self._lock = threading.Lock()  # of a request and its answer
        self._socket, theirs = multiprocessing.Pipe(duplex=True)
        self._process: Any
        if start is not None:
            self._process = start.fork(_forked_main, (module, dict(env)), theirs)
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["torch", "torch.distributed", "pytest"])
            # A daemon: otherwise the end of pytest waits for it.
            self._process = context.Process(
                target=_template_main, args=(theirs, module, dict(env)), daemon=True
            )
            # A test's own imports come first, and not this package, which reaches children by this.
            data = inspect.unwrap(spawn.get_preparation_data)
            with _main_module_hidden(), mock.patch.object(spawn, "get_preparation_data", data):
                self._process.start()
        theirs.close()

    def fork(
        self,
        target: Callable[..., None],
        args: tuple[Any, ...],
        pipe: multiprocessing.connection.Connection,
    ) -> ForkedProcess:
        """Run ``target(*args, pipe)`` in a process forked from the template. It must not return."""
        with self._lock:
            self._socket.send(("fork", pickle.dumps((target, args))))
            reduction.send_handle(self._socket, pipe.fileno(), self._process.pid)
            return ForkedProcess(self, self._socket.recv())

    def exit_code(self, pid: int) -> int | None:
        """The exit code of a forked process (minus the signal that ended it), None while it
        runs."""
        with self._lock:
            self._socket.send(("poll", pid))
            return self._socket.recv()

    def close(self) -> None:
        """End the template. Processes that it forked end with it."""
        self._socket.close()
        self._process.join()


_templates: collections.OrderedDict[tuple[Any, ...], Template] = collections.OrderedDict()


@functools.cache
def _third_parties() -> Template:
    return Template(None, "tests.support.rank_server", {"OMP_NUM_THREADS": "1"})


@functools.cache
def _with_the_package() -> Template:
    return Template(_third_parties(), "megatron_fluid", {})


def template_for(module: str, env: Mapping[str, str], bare: bool) -> Template:
    """The template of a module and environment; the ones that were asked for last are kept. bare:
    it must not have imported megatron_fluid before that module."""
    key = (module, *sorted(env.items()))
    template = _templates.pop(key, None)
    if template is None:
        template = Template(_third_parties() if bare else _with_the_package(), module, env)
    _templates[key] = template
    while len(_templates) > _KEPT:
        _templates.popitem(last=False)[1].close()
    return template


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from importing pytest's main module again in each rank."""
    main = sys.modules["__main__"]
    if _defines_the_function(main):
        yield
        return
    hidden = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in hidden:
        del main.__file__
    try:
        yield
    finally:
        vars(main).update(hidden)


def _defines_the_function(main: Any) -> bool:
    """Whether the test itself is the main program (``python tests/x.py``), whose functions pickle
    as ``__main__``'s."""
    name = (
        getattr(getattr(main, "__spec__", None), "name", "")
        or Path(getattr(main, "__file__", "") or "").stem
    )
    return not (
        name.startswith("pytest") or name in ("py.test", "__main__", "__mp_main__", "runpy")
    )


def die_with_parent() -> None:
    """Ask the system to kill this process when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _forked_main(
    module: str, env: Mapping[str, str], pipe: multiprocessing.connection.Connection
) -> None:
    _template_main(multiprocessing.connection.Connection(os.dup(pipe.fileno())), module, env)


def _template_main(
    socket: multiprocessing.connection.Connection, module: str, env: Mapping[str, str]
) -> None:
    die_with_parent()
    multiprocessing.current_process().daemon = False  # so that its ranks may start processes
    os.environ.update(env)
    if module:
        with contextlib.suppress(Exception):  # the rank that needs it says why
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # no rank's collector copies these pages
    exit_codes: dict[int, int] = {}
    for request, content in _requests(socket):
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
    os._exit(0)


def _requests(socket: multiprocessing.connection.Connection) -> Iterable[tuple[str, Any]]:
    """What the pytest process asks for, until it closes its end."""
    while True:
        try:
            yield socket.recv()
        except (EOFError, ConnectionError):
            return


def _run(payload: bytes, handle: int) -> None:
    try:
        target, args = pickle.loads(payload)
        target(*args, multiprocessing.connection.Connection(handle, readable=False))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)  # reached only where the target returned or raised: it ends the process itself
