"""The context that overlapped layers of one process group share."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_fluid.comm.p2p_rounds import P2PRounds, shared_rounds
from megatron_fluid.errors import ConfigError

__all__ = ["MultiCardOverlapContext"]


class MultiCardOverlapContext:
    """The schedule, communication stream and rounds that the overlapped layers of a group share.

    It holds nothing about any call: a forward keeps its state in its own object.

    Args:
        device: where the tensors live.
        ep_size: number of ranks W; may be left out with `group`.
        group: the process group; None binds the context to the group of its first use.
        timeout_s: bound in seconds on every wait for a peer; None takes the configuration's.

    Raises:
        ConfigError: neither ep_size nor group, or the two disagree.
    """

    def __init__(
        self,
        device: torch.device | str,
        ep_size: int | None = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.timeout_s = timeout_s
        if ep_size is None:
            if group is None:
                found = "found neither ep_size nor group, allowed: one of them"
                raise ConfigError(f"MultiCardOverlapContext: {found}")
            ep_size = group.size()
        if ep_size < 1:
            raise ConfigError.of("ep_size", ep_size, "1 or more")
        self.ep_size = ep_size
        self._rounds: P2PRounds | None = None
        if group is not None:
            self.rounds(group)

    def rounds(self, group: dist.ProcessGroup | None = None) -> P2PRounds:
        """Return the rounds of `group` and bind the context to it. Collective at the first call.

        Raises:
            ConfigError: a group of another size than ep_size, or no group yet.
        """
        if group is None:
            if self._rounds is None:
                raise ConfigError(
                    "MultiCardOverlapContext: no process group yet; give one to the constructor"
                )
            return self._rounds
        if self._rounds is None or self._rounds.group is not group:
            if group.size() != self.ep_size:
                allowed = f"{group.size()}, the size of the group"
                raise ConfigError.of("ep_size", self.ep_size, allowed)
            self._rounds = shared_rounds(group, self.timeout_s)
        return self._rounds
