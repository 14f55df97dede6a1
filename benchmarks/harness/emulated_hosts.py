"""Hosts that one machine plays: network namespaces joined by links of a chosen rate.

    host 0: namespace, wire0 --- tbf ---+
    host 1: namespace, wire0 --- tbf ---+--- bridge, in a namespace of its own
    host 2: namespace, wire0 --- tbf ---+

Ranks of one host reach each other over its loopback at memory speed. What a host sends to others
passes its token-bucket filter (tbf), which lets through `set_rate` bits a second; what it receives
is limited by the senders alone. Hosts control congestion by reno, whatever the machine does: by bbr
a stream whose rate it has once found low leaves the link idle for tens of milliseconds when others
have ended, now and then. Frames have 9,000 bytes, as cluster networks have: with 1,500 the
cores that compute spend up to 40% of their time on packets, for which real hosts have network
adapters. Nothing is made in the machine's own namespace, and nothing outside this machine can be
reached. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

__all__ = ["DEVICE", "EmulatedHosts", "launch_environment", "missing", "remove_stale"]

DEVICE = "wire0"
"""The interface of every host."""
_PREFIX = "fluid-hosts"
_NAME = re.compile(rf"{_PREFIX}-(\d+)-\w+")
# A packet that the network stack has not yet cut may have 64 KiB; a larger bucket would let the
# first bytes of each message through at once.
_BURST_BYTES = 64 * 1024
# All that a host's streams may have under way: of 4 MiB reno lost a message's last packets now and
# then, and a call then waited a second for them to be sent again.
_QUEUE_BYTES = 32 * 2**20
_FRAME_BYTES = "9000"
_CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"
_GRACE_S = 5.0


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip() or f'exit {done.returncode}'}")


def missing() -> str | None:
    """What this machine lacks to play hosts, or None."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} is missing (Debian, Ubuntu: apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with EmulatedHosts(2) as hosts:
            hosts.set_rate(1e9)
    except OSError as error:
        return f"the kernel or the container refuses it: {error}"
    return None


def remove_stale() -> list[str]:
    """Remove what processes that no longer live have left; return the names."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=30)
    removed = []
    for line in done.stdout.splitlines():
        name = line.split()[0] if line.split() else ""
        match = _NAME.fullmatch(name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            with contextlib.suppress(OSError):
                _run("ip", "netns", "delete", name)
                removed.append(name)
    return removed


class EmulatedHosts:
    """A context in which `count` hosts stand. On leaving it, also by Ctrl-C or SIGTERM, processes
    started in them are killed and the namespaces removed.

    Attributes:
        names: namespaces of the hosts.
        addresses: IPv4 address of each host, inside 10.99.0.0/24.

    Raises:
        OSError: the machine cannot play hosts; see `missing`.
    """

    def __init__(self, count: int) -> None:
        if not 2 <= count <= 8:
            raise ValueError(f"found {count} hosts, allowed: 2 to 8")
        base = f"{_PREFIX}-{os.getpid()}"
        self.names = [f"{base}-h{index}" for index in range(count)]
        self.addresses = [f"10.99.0.{index + 1}" for index in range(count)]
        self._switch = f"{base}-switch"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._made: list[str] = []
        self._terminated = signal.getsignal(signal.SIGTERM)

    def __enter__(self) -> EmulatedHosts:
        def end(number: int, frame: FrameType | None) -> None:
            raise SystemExit(128 + number)

        with contextlib.suppress(ValueError):  # not the main thread
            self._terminated = signal.signal(signal.SIGTERM, end)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        remove_stale()
        for name in (self._switch, *self.names):
            self._made.append(name)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        mtu = ("mtu", _FRAME_BYTES)
        _run("ip", "-n", self._switch, "link", "add", "bridge0", *mtu, "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge0", "up")
        for index, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            port = f"port{index}"
            pair = ("peer", "name", DEVICE, "netns", name, *mtu)
            _run("ip", "-n", self._switch, "link", "add", port, *mtu, "type", "veth", *pair)
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge0")
            _run("ip", "-n", self._switch, "link", "set", port, "up")
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", DEVICE)
            _run("ip", "-n", name, "link", "set", DEVICE, "up")
            # Every kernel has it, and lets namespaces choose it.
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo reno > {_CONGESTION}")

    def set_rate(self, bits_per_s: float | None, hosts: Sequence[int] | None = None) -> None:
        """Limit what hosts (all by default) send to others; None: no limit. Takes effect at once,
        also for connections that stand."""
        for index in range(len(self.names)) if hosts is None else hosts:
            device = ("-n", self.names[index], "qdisc", "replace", "dev", DEVICE, "root")
            if bits_per_s is None:
                _run("tc", *device, "pfifo", "limit", "1000")
                continue
            bucket = ("burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))
            _run("tc", *device, "tbf", "rate", f"{max(round(bits_per_s), 8000)}bit", *bucket)

    def cut(self, host: int, connected: bool = False) -> None:
        """Take a host's link down, or up again."""
        state = "up" if connected else "down"
        _run("ip", "-n", self.names[host], "link", "set", DEVICE, state)

    def start(
        self,
        host: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        log: str | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process in a host. It ends with the context at the latest.

        Args:
            environment: beside this process's own.
            log: file for its output; None for this process's own.
        """
        out = open(log, "ab") if log else None  # noqa: SIM115 (the child's, closed below)
        try:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *command],
                env={**os.environ, **environment},
                pass_fds=tuple(pass_fds),
                stdout=out,
                stderr=subprocess.STDOUT if out else None,
                start_new_session=True,
            )
        finally:
            if out is not None:
                out.close()
        self._processes.append(process)
        return process

    def stop(self) -> None:
        """Kill the processes that were started."""
        processes, self._processes = self._processes, []
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)

    def close(self) -> None:
        """Kill the processes and remove the namespaces, with which their links go. Idempotent."""
        with _uninterrupted():
            self.stop()
            made, self._made = self._made, []
            for name in made:
                with contextlib.suppress(OSError):
                    _run("ip", "netns", "delete", name)
            with contextlib.suppress(ValueError):
                signal.signal(signal.SIGTERM, self._terminated)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C does not leave namespaces behind."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def launch_environment(hosts: EmulatedHosts, ranks_per_host: int, rank: int) -> dict[str, str]:
    """What torchrun would set for a rank, and the name of its host as NVLink domain."""
    host = rank // ranks_per_host
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts.names) * ranks_per_host),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_RANK": str(host),
        "MASTER_ADDR": hosts.addresses[0],
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": DEVICE,
        "MEGATRON_FLUID_NVLINK_DOMAIN": hosts.names[host],
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
