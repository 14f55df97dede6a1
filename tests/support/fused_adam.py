"""Transformer Engine's FusedAdam as far as Megatron's distributed optimizer uses it, in torch on
any device: the same state, and arithmetic in the same order, but for fused multiply-adds."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW, or with `adam_w_mode` False Adam."""

    capturable = master_weights = use_decoupled_grad = False
    exp_avg_dtype = exp_avg_sq_dtype = torch.float32

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 0.0, adam_w_mode: bool = True, **_: Any,
    ) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": True})
        self.adam_w_mode = int(adam_w_mode)
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            beta1, beta2 = torch.tensor(group["betas"], dtype=torch.float32)
            correction1 = 1 - float(beta1) ** group["step"]
            correction2 = 1 - float(beta2) ** group["step"]
            for p in group["params"]:
                state = self.state[p]
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(p)
                m, v, g = state["exp_avg"], state["exp_avg_sq"], p.grad
                if not self.adam_w_mode:
                    g = g + group["weight_decay"] * p
                m.copy_(beta1 * m + (1 - beta1) * g)
                v.copy_(beta2 * v + (1 - beta2) * g * g)
                update = (m / correction1) / ((v / correction2).sqrt() + group["eps"])
                if self.adam_w_mode:
                    update += group["weight_decay"] * p
                p.sub_(group["lr"] * update)


FusedAdam.__module__ = "transformer_engine.pytorch.optimizers.fused_adam"


def copies(optimizer: Any) -> tuple[list[tuple[Any, Any]], dict[Any, int]]:
    """Where an optimizer with `shards` and `models` copies each shard: in place of model_slices of
    patches/optimizer_step.py."""
    return list(zip(optimizer.shards, optimizer.models, strict=True)), {}


class ShardedOptimizer:
    """What the patch reads of a distributed optimizer: fp32 shards of `sizes`, and where they are
    copied, in the dtype `kind`. The first half decays. `adam` makes it, with `settings`."""

    shard_fp32_from_float16_groups: Any = ()

    def __init__(
        self, sizes: Sequence[int], kind: torch.dtype, adam: Callable[..., Any] = FusedAdam,
        device: str = "cpu", **settings: Any,
    ) -> None:  # fmt: skip
        self.draw = torch.Generator(device).manual_seed(1)
        self.config = SimpleNamespace(
            timers=None, barrier_with_L1_time=False, reuse_grad_buf_for_mxfp8_param_ag=False
        )
        self.shards = [torch.nn.Parameter(self.normal(size)) for size in sizes]
        self.models = [shard.detach().to(kind) for shard in self.shards]
        half = len(sizes) // 2
        groups = [
            {"params": self.shards[:half], "weight_decay": 0.1},
            {"params": self.shards[half:]},
        ]
        self.optimizer = adam(groups, **{"lr": 1e-2, **settings})

    def normal(self, size: int) -> Tensor:
        """Random numbers, of shards and of gradients."""
        return 3 * torch.randn(size, device=self.draw.device, generator=self.draw)

    def fill(self) -> None:
        """New gradients, where the old ones are: DDP's buffer stays where it is."""
        for shard in self.shards:
            gradient = self.normal(shard.numel())
            shard.grad = gradient if shard.grad is None else shard.grad.copy_(gradient)

    def step(self) -> bool:
        self.optimizer.step()
        for shard, model in zip(self.shards, self.models, strict=True):
            model.copy_(shard.detach())
        return True
