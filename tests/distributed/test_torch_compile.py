"""The layers and operations inside torch.compile, and under what else autograd offers: equal to
what runs as written, or one error by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.func import functional_call, grad, hessian, jvp, vmap
from torch.utils.checkpoint import checkpoint

from megatron_fluid import (
    AllToAll,
    MoEBaseline,
    MoELayer,
    SelfAttention,
    TransformerLayer,
    all_gather_matmul,
    get_backward_scheduler,
    matmul_reduce_scatter,
)
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.cpu import device as cpu_device
from tests.support.launch import on_ranks

H = 16
SIZES: dict[str, Any] = {"hidden_size": H, "ffn_hidden_size": 24, "num_experts": 4, "top_k": 2}
SIZES |= {"init_std": 0.4}


class TensorParallel(nn.Module):
    """A column-parallel and a row-parallel linear."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = nn.Linear(H, 12, bias=False), nn.Linear(12, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, H)
        h = torch.relu(all_gather_matmul(rows, self.up.weight, self.group, transpose_b=True))
        y = matmul_reduce_scatter(h, self.down.weight, self.group, transpose_b=True)
        return y.view(x.shape)


class Exchanged(nn.Module):
    """Tokens that go to their experts' ranks and come back. Not differentiable."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        rank, world = group.rank(), group.size()
        self.all_to_all = AllToAll.intranode(64, 4, 2, rank, world, 1, H, 4 * H, 0, group=group)
        self.experts = 4 // world

    def forward(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1, H)
        ids = torch.stack([flat.argmax(-1) % 4, flat.argmin(-1) % 4], 1).int()
        weights = flat[:, :2].abs().contiguous()
        counts = torch.zeros(self.experts, dtype=torch.int32)
        rows = flat.new_zeros(self.experts, self.all_to_all.layout.max_rows, H)
        self.all_to_all.dispatch(counts, rows, None, flat, None, ids, None)
        out = torch.empty_like(flat)
        self.all_to_all.combine(out, ids, weights, rows.bfloat16(), None)
        return out.view(x.shape) + x


class Around(nn.Module):
    """What torch.compile compiles around a part."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.before, self.part, self.after = nn.Linear(H, H), part, nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.part(torch.relu(self.before(x)))).sin()


# The part, and into how many graphs it breaks the model around it.
PARTS: dict[str, tuple[Callable[[Any], nn.Module], int]] = {
    "MoELayer": (lambda group: MoELayer(SIZES, group), 2),
    "MoEBaseline": (lambda group: MoEBaseline(SIZES, group), 2),
    "SelfAttention": (lambda group: SelfAttention(H, 4, group=group), 2),
    "TransformerLayer": (
        lambda group: TransformerLayer(
            {**SIZES, "num_attention_heads": 4}, ep_group=group, cp_group=group
        ),
        5,
    ),
    "linears": (TensorParallel, 5),
    "AllToAll": (Exchanged, 5),
}


def gradients(
    model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    model.zero_grad()
    x.grad = None
    y = (run or model)(x)
    y.square().sum().backward()
    get_backward_scheduler().finish_batch()
    return [y.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "world", "names"), [
    ("eager", 1, ("MoELayer", "SelfAttention")),  # whose paths on one rank are others
    ("eager", 2, tuple(PARTS)),
    ("inductor", 1, ("MoELayer",)),  # it compiles what is around a part
])  # fmt: skip
@on_ranks()
def test_a_compiled_model_equals_the_model_as_written(
    rank: int, world: int, backend: str, names: tuple[str, ...]
) -> None:
    cpu_device.switches.run_compiled_functions_eagerly = False
    cpu_device.switches.device_literals = False
    # A pool of compilers, a header compiled for many kernels, and programs that try the processor's
    # vectors cost more than these few.
    inductor_config.compile_threads = 1
    inductor_config.cpp_cache_precompile_headers = False
    inductor_config.cpp.vec_isa_ok = False
    generator = torch.Generator().manual_seed(rank)
    data = [torch.randn(6, 2, H, generator=generator).requires_grad_() for _ in range(3)]
    for name in names:
        make, graphs = PARTS[name]
        model = Around(make(dist.group.WORLD))
        expected = [gradients(model, x) for x in data]
        compiled = torch.compile(model, backend=backend)
        counters.clear()
        for deferred in (False, True):
            get_backward_scheduler().enabled = deferred
            for x, wanted in zip(data, expected, strict=True):
                for found, right in zip(gradients(compiled, x), wanted, strict=True):
                    assert (found - right).norm() <= 1e-3 * right.norm(), name
            # Each graph was compiled once.
            assert counters["stats"]["unique_graphs"] == graphs, (name, counters["graph_break"])
        get_backward_scheduler().disable()
        torch.compiler.reset()


@pytest.mark.parametrize("name", PARTS)
@on_ranks(2)
def test_transforms_and_gradients_of_gradients_are_refused_by_name(
    rank: int, world: int, name: str
) -> None:
    """torch.func refuses all parts; what is a backward of its own is refused in the backward."""
    layer = PARTS[name][0](dist.group.WORLD)
    x = torch.randn(6, 2, H)
    params = {key: value.detach() for key, value in layer.named_parameters()}
    for transformed in (
        lambda: grad(lambda p: functional_call(layer, p, (x,)).sum())(params),
        lambda: grad(lambda t: layer(t).sum())(x),
        lambda: vmap(layer)(torch.stack([x, x])),
        lambda: jvp(layer, (x,), (x,)),
        lambda: hessian(lambda t: layer(t).sum())(x),
        lambda: torch.export.export(layer, (x,)),
    ):
        named = "transform: found 'torch.func or torch.export', allowed"
        with pytest.raises(ConfigError, match=named):
            transformed()
    x.requires_grad_()
    y = layer(x)
    if name == "AllToAll" or not y.requires_grad:
        return
    ones = torch.ones(2, *y.shape)
    with pytest.raises(ConfigError, match="backward: is_grads_batched or vectorize: found True"):
        torch.autograd.grad(y, x, ones, is_grads_batched=True, retain_graph=True)
    with pytest.raises(ConfigError, match="backward: is_grads_batched or vectorize: found True"):
        torch.autograd.functional.jacobian(layer, x.detach(), vectorize=True)
    for loss in (y.sum(), layer(x).square().sum()):
        for inputs in ([x], list(layer.parameters())):
            kept: dict[str, Any] = {"retain_graph": True, "allow_unused": True}
            with pytest.raises(ConfigError, match="backward: create_graph: found True"):
                torch.autograd.grad(loss, inputs, create_graph=True, **kept)
    wanted = torch.autograd.grad(layer(x).sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x, ones[0])[0], wanted)  # and goes on


@pytest.mark.parametrize("name", [name for name in PARTS if name != "AllToAll"])
@on_ranks(2)
def test_checkpoints_kept_graphs_autocast_and_inference_equal_a_plain_step(
    rank: int, world: int, name: str
) -> None:
    layer = PARTS[name][0](dist.group.WORLD)
    x = torch.randn(6, 2, H, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    with torch.inference_mode():
        evaluated = layer(x)
    wanted = gradients(layer, x)
    torch.testing.assert_close(evaluated, wanted[0])
    for reentrant in (False, True):
        for deferred in (False, True):
            get_backward_scheduler().enabled = deferred
            again = gradients(layer, x, lambda t: checkpoint(layer, t, use_reentrant=reentrant))  # noqa: B023
            torch.testing.assert_close(again, wanted)
        get_backward_scheduler().disable()
    y = layer(x)
    layer.zero_grad()
    x.grad = None
    for number in (1, 2):
        y.square().sum().backward(retain_graph=True)
        found = [t.grad for t in (x, *layer.parameters()) if t.grad is not None]
        torch.testing.assert_close(found, [number * t for t in wanted[1:]])
    with torch.autocast("cpu", torch.bfloat16):
        narrow = gradients(layer, x, lambda t: layer(t).float())
    for one, other in zip(narrow, wanted, strict=True):
        assert one.dtype == other.dtype and (one - other).norm() < 0.1 * other.norm()
