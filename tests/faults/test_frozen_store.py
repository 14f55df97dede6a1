"""The rank that holds the job's store is frozen: its peers still report, in bounded time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_fluid.comm import agreement
from megatron_fluid.comm.agreement import Agreement
from megatron_fluid.comm.waits import explain
from megatron_fluid.errors import PeerTimeoutError

HOST = """
import datetime, time, torch.distributed as dist
second = datetime.timedelta(seconds=60)
store = dist.TCPStore("127.0.0.1", 0, 2, True, second, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """A store that answered once, and whose host is stopped now."""
    monkeypatch.setattr(agreement, "STORE_S", 0.5)
    host = subprocess.Popen([sys.executable, "-c", HOST], stdout=subprocess.PIPE, text=True)
    try:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        store = dist.TCPStore(
            "127.0.0.1", port, 2, False, timedelta(seconds=60), wait_for_workers=False
        )
        store.set("key", "value")
        assert store.get("key") == b"value"
        os.kill(host.pid, signal.SIGSTOP)
        yield store
    finally:
        host.kill()  # also what waits for it in a thread of this process ends then
        host.wait()


def test_the_own_error_is_told_in_bounded_time(frozen: dist.Store) -> None:
    channel = Agreement(frozen, "group", 1, range(3), lambda: 5.0)
    error = PeerTimeoutError(1, 2, "moe dispatch", 3, 5.0)
    start = time.monotonic()
    told = explain(error, channel, grace_s=0.2)
    assert time.monotonic() - start < 20
    assert "the store of the job does not answer" in told
