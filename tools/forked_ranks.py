"""Run pytest on several CPU ranks that are forked from one process.

    python tools/forked_ranks.py RANKS [pytest arguments]

Torch and Megatron take about 10 s of a core to import: here once, not once a rank. Only for
machines without a GPU (CUDA does not survive a fork). The folder that this runs in goes first on
the path, as under `python -m pytest`. The environment of a rank is torchrun's, and so is the store,
which this process serves.

Every rank runs on to its last test, also if some fail. One that ends earlier (a test's timeout, a
crash) takes the others with it. The exit status is 0 if every rank came to its end.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]

# What nearly all of Megatron's test modules import; none asks for the rank while it is imported.
_IMPORTED_ONCE = (
    "megatron_pytest_plugin",  # first: it patches what follows
    "megatron.training.argument_utils",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.models.gpt.gpt_layer_specs",
    "pytest",
)
_WHOLE = (0, 1, 5)  # pytest: all passed, some failed, none collected


def _run(rank: int, arguments: Sequence[str]) -> NoReturn:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    code = 70
    try:
        pytest = importlib.import_module("pytest")
        ended = int(pytest.main(list(arguments)))
        code = 0 if ended in _WHOLE else 100 + ended
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(arguments: Sequence[str]) -> int:
    """Import, fork, serve the store, and wait."""
    ranks, pytest_arguments = int(arguments[0]), arguments[1:]
    sys.path[0] = os.getcwd()
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "forked"}
    for module in _IMPORTED_ONCE:
        with contextlib.suppress(ImportError):  # the tests that need it say so
            importlib.import_module(module)
    children = set()
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            listener.close()
            _run(rank, pytest_arguments)
        children.add(child)
    from torch.distributed import TCPStore

    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    code = 0
    while children:
        child, status = os.wait()
        children.discard(child)
        if status and not code:
            code = os.waitstatus_to_exitcode(status) & 255
            for other in children:
                os.kill(other, signal.SIGKILL)
    del store
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
