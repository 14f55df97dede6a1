"""Workspaces of all ranks in one process, on a CPU (TRITON_INTERPRET=1) or on one GPU."""

import torch
from torch import Tensor

from megatron_fluid.comm.workspace import Buffer, Workspace
from megatron_fluid.cuda.devices import synchronize


class SimulatedWorkspace:
    """All ranks of a group in one process: `rank(r)` is rank r's Workspace. Run each step of an
    operation for every rank in turn: producers run before consumers, so no wait spins. Buffers are
    ordinary memory of `device`, filled with a poison value. Ranks fail on purpose, unwatched."""

    def __init__(
        self, world_size: int, device: torch.device | str = "cpu", timeout_s: float = 1.0,
        watched: bool = False, flag_words: int = 0,
    ) -> None:  # fmt: skip
        self.world_size = world_size
        self.device = torch.device(device)
        self._memory: dict[tuple[str, torch.dtype, int], list[Tensor]] = {}
        self._ranks = [
            _SimulatedRank(self, r, timeout_s, watched, flag_words) for r in range(world_size)
        ]

    def rank(self, rank: int) -> Workspace:
        """Return rank `rank`'s side of the workspace."""
        return self._ranks[rank]

    def shared(self, name: str, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return every rank's memory of one buffer; the first rank to ask allocates for all."""
        key = (name, dtype, numel)
        if key not in self._memory:
            poison = float("nan") if dtype.is_floating_point else -12345
            self._memory[key] = [
                torch.full((numel,), poison, dtype=dtype, device=self.device)
                for _ in range(self.world_size)
            ]
            synchronize(self.device)
        return self._memory[key]


class _SimulatedRank(Workspace):
    def __init__(
        self, owner: SimulatedWorkspace, rank: int, timeout_s: float, watched: bool, flag_words: int
    ) -> None:
        super().__init__(rank, owner.world_size, owner.device, timeout_s, watched, flag_words)
        self._owner = owner
        self._open_arenas()

    def _allocate(self, name: str, numel: int, dtype: torch.dtype) -> Buffer:
        peers = self._owner.shared(name, numel, dtype)
        addresses = [p.data_ptr() for p in peers]
        pointers = torch.tensor(addresses, dtype=torch.int64, device=self.device)
        return Buffer(peers[self.rank], peers, pointers, None)
