"""The process groups of one half of tests/support/training_world.py, made again and again, and what
of a model's parameters lies on a rank of them."""

import gc
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Groups:
    """The process groups of one half: `rank` of `ranks`, a store at `port`, collectives of at most
    `bound_s`. `expert_ranks` is that of the groups that there are."""

    def __init__(self, port: int, rank: int, ranks: int, bound_s: float) -> None:
        self._bound = timedelta(seconds=bound_s)
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=self._bound)
        self.rank, self.expert_ranks = rank, 0
        self._ranks, self._life = ranks, 0

    def make(self, expert_ranks: int, whole: bool) -> None:
        """Make Megatron's groups, and first destroy those that there are, all of them (`whole`) or
        all but the default group. Each default group has a part of the store for itself, as after
        an elastic restart: gloo would find the addresses of the one before."""
        from megatron.core import parallel_state

        from tests.support import tiny_gpt

        if dist.is_initialized():
            self._leave(whole)
        if whole:
            store = dist.PrefixStore(f"life {self._life}", self._store)
            how: dict[str, Any] = {"rank": self.rank, "world_size": self._ranks}
            dist.init_process_group("gloo", store=store, timeout=self._bound, **how)
        assert not parallel_state.model_parallel_is_initialized()
        few: Any = {"create_gloo_process_groups": False}
        tiny_gpt.parallel(expert_model_parallel_size=expert_ranks, **few)
        self.expert_ranks = expert_ranks

    def _leave(self, whole: bool) -> None:
        from megatron.core import parallel_state

        dist.barrier()
        self._life += 1  # nobody closes a connection that another still reads from
        self._store.set(f"over {self._life} {self.rank}", "")
        self._store.wait([f"over {self._life} {rank}" for rank in range(self._ranks)])
        parallel_state.destroy_model_parallel()
        if whole:
            dist.destroy_process_group()
        else:
            for group in list(dist.distributed_c10d._world.pg_map):
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)
        gc.collect()


def shares_of(ddp: Any) -> dict[str, Tensor]:
    """This rank's share of each bucket of parameters."""
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    shares = {}
    for kind in ("buffers", "expert_parallel_buffers"):
        for i, buffer in enumerate(getattr(ddp, kind)):
            ranks, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            for j, bucket in enumerate(buffer.buckets):
                share = shard_buffer(bucket.param_data, ranks)[rank]
                shares[f"{kind} {i}, bucket {j}"] = share.detach().clone()
    return shares
