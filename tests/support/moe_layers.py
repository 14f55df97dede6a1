"""Small MoE layers in double precision, as the tests of MoELayer and MoEBaseline build them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fluid import SelfAttention, TransformerLayer
from megatron_fluid.moe.sharding import local_part

F64 = torch.float64
CONFIG: dict[str, Any] = {
    "hidden_size": 8, "ffn_hidden_size": 12, "num_experts": 6, "top_k": 2, "init_std": 0.4,
    "dx_chunks": 2,
}  # fmt: skip


def group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def layer_of(
    kind: type[nn.Module], group: Any, sizes: dict[str, Any] = CONFIG, layer_id: int = 0,
    **options: Any,
) -> Any:  # fmt: skip
    """A small layer of any kind; layer_id seeds the weights of all but SelfAttention."""
    options = {"dtype": F64, **options}
    if kind is SelfAttention:
        return kind(8, 2, group=group, **options)
    options["layer_id"] = layer_id
    if kind is TransformerLayer:
        sizes = {**sizes, "num_attention_heads": 2}
        return kind(sizes, ep_group=group, cp_group=group, **options)
    return kind(sizes, group, **options)


def tokens_of(rank: int, seed: int = 0) -> Tensor:
    """Uneven: rank 0 has none."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(5 * rank, 8, generator=generator, dtype=F64)


def whole(tensor: Tensor) -> Tensor:
    """A copy without history; of DTensors: all ranks' parts. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def close(found: Tensor | None, expected: Tensor | None) -> None:
    """Of DTensors: this rank's parts."""
    assert found is not None and expected is not None
    found, expected = local_part(found), local_part(expected)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
