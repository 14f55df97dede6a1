"""Megatron's tensor-parallel linears, and how right main_grad is with gradient accumulation
fusion."""

from typing import Any

import torch

from tests.support.launch import world_group
from tests.support.whole_linear import whole_linear


def linear_of(
    mode: str, inputs: int, outputs: int, cls: type | None = None, bias: bool = False, **fields: Any
) -> Any:
    """A linear of one dense layer, of Megatron's class or of `cls`. mode: "row", or else column."""
    from megatron.core.tensor_parallel import layers

    from tests.support import tiny_gpt

    dense = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "expert_model_parallel_size": 1}
    named: dict[str, Any] = {"init_method": torch.nn.init.normal_, "skip_bias_add": False}
    if mode == "row":
        named["input_is_parallel"] = True
    kind = layers.RowParallelLinear if mode == "row" else layers.ColumnParallelLinear
    config = tiny_gpt.config_of(**dense, **fields)
    return (cls or kind)(inputs, outputs, config=config, bias=bias, **named)


def fused_linear(mode: str, dtype: torch.dtype, inputs: int, outputs: int) -> Any:
    """One of this type, with gradient accumulation fusion."""
    settings = {"params_dtype": dtype, "bf16": dtype == torch.bfloat16}
    return linear_of(mode, inputs, outputs, gradient_accumulation_fusion=True, **settings)


def main_grad_errors(
    sequence: int, batch: int, inputs: int, outputs: int, device: str = "cpu"
) -> dict[str, float]:
    """The largest relative error of main_grad after two microbatches on the tensor-parallel ranks
    of the world, by case; also of microbatches without a row."""
    group = world_group()
    rank, ranks = group.rank(), group.size()
    bf16, fp32 = torch.bfloat16, torch.float32
    found = {}
    for mode in ("column", "row"):
        for dtype, of_main in ((fp32, fp32), (bf16, fp32), (bf16, bf16)):
            for size in (batch, 0):
                linear = fused_linear(mode, dtype, inputs, outputs).to(device)
                weight = linear.weight
                weight.grad_added_to_main_grad = False
                buffer = torch.full((weight.numel() + 64,), 7.0, dtype=of_main, device=device)
                weight.main_grad = buffer[64:].view(weight.shape)  # a view, as of DDP's buffers
                expected = torch.full(weight.shape, 7.0, dtype=torch.float64, device=device)
                for microbatch in range(2):
                    torch.manual_seed(10 * microbatch + rank)
                    column = mode == "column"
                    rows, width = (sequence // ranks, 1) if column else (sequence, ranks)
                    x = torch.randn(rows, size, inputs // width, dtype=dtype, device=device)
                    out, _ = linear(x.requires_grad_())
                    upstream = torch.randn_like(out)
                    out.backward(upstream)
                    tensors = {"x": x, "weight": weight}
                    expected += whole_linear(mode, group, tensors, upstream)["weight"]
                assert weight.grad_added_to_main_grad
                assert torch.all(buffer[:64] == 7)
                error = (weight.main_grad.double() - expected).abs().max() / expected.abs().max()
                found[f"{mode}, {dtype} into {of_main}, {size}"] = float(error)
    return found
