"""The optimizer's step in one launch against Transformer Engine's Adam and clipping on a GPU, bit
for bit."""

import importlib.util

import pytest
import torch

from tests.support.fused_adam import ShardedOptimizer, copies

TE = importlib.util.find_spec("transformer_engine") is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(not TE, reason="needs Transformer Engine"),
]

SIZES = [1, 33, 2048, 2049, 100_000, 7, 3 * 2048]


class _Optimizer(ShardedOptimizer):
    """With Transformer Engine's Adam, and numbers of many sizes."""

    def __init__(self, kind: torch.dtype, decoupled: bool) -> None:
        from transformer_engine.pytorch.optimizers import FusedAdam

        settings = {"lr": 3e-3, "betas": (0.9, 0.95), "adam_w_mode": decoupled}
        super().__init__(SIZES, kind, FusedAdam, "cuda", **settings)

    def normal(self, size: int) -> torch.Tensor:
        spread = torch.randn(size, device="cuda", generator=self.draw)
        return torch.randn(size, device="cuda", generator=self.draw) * spread.mul(4).exp2()


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_bit_is_transformer_engines(
    kind: torch.dtype, decoupled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32 as clip

    from megatron_fluid.patches import optimizer_step

    monkeypatch.setattr(optimizer_step, "is_plain", lambda optimizer: True)
    monkeypatch.setattr(optimizer_step, "model_slices", copies)
    theirs, ours = _Optimizer(kind, decoupled), _Optimizer(kind, decoupled)
    step = optimizer_step.step_in_one_pass(ShardedOptimizer.step)
    later = optimizer_step.clip_later(clip)
    for number in range(8):
        for optimizer, one, other in ((theirs, ShardedOptimizer.step, clip), (ours, step, later)):
            optimizer.fill()
            norm = torch.cat([shard.grad for shard in optimizer.shards]).norm().view(1)
            given = norm if number % 2 else float(norm)  # Megatron's is on the device
            other(list(optimizer.shards), 1.0 if number % 3 else 2 * float(norm), given)
            assert one(optimizer)
    assert ours._fluid_one_pass is not None  # type: ignore[attr-defined]
    different = {}
    for n, a, b in zip(SIZES, theirs.shards, ours.shards, strict=True):
        states = theirs.optimizer.state[a], ours.optimizer.state[b]
        pairs = {"parameter": (a, b)}
        pairs |= {name: tuple(s[name] for s in states) for name in ("exp_avg", "exp_avg_sq")}
        for name, (one, other) in pairs.items():
            if not torch.equal(one, other):
                different[n, name] = int((one != other).sum())
    assert not different, different
    for one, other in zip(theirs.models, ours.models, strict=True):
        assert torch.equal(one, other)
