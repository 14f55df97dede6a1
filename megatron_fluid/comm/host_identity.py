"""A name for the host of this process that no other host has."""

from __future__ import annotations

import socket

__all__ = ["BOOT_ID", "host_identity"]

BOOT_ID = "/proc/sys/kernel/random/boot_id"


def host_identity() -> str:
    """Return the host name and the id of the kernel's boot, as in "node7 (boot 1f0c...)".

    Host names alone collide: containers on two machines may share one. Where the kernel tells no
    boot id, the host name alone is returned.
    """
    try:
        with open(BOOT_ID, encoding="ascii") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    return f"{socket.gethostname()} (boot {boot})" if boot else socket.gethostname()
