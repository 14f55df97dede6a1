"""Experts in fp8 on one rank without a GPU: outputs and every gradient against an fp32 reference
and against the recipe in plain torch."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid import MoEConfig, MoELayer
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_casts.packed_rows import packed_width
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.moe import fp8_experts
from megatron_fluid.moe.activations import resolve_activation
from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups
from megatron_fluid.moe.local import transport
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers
from megatron_fluid.moe.nvlink.schedule import Schedule
from megatron_fluid.moe.nvlink.transport import NvlinkTransport
from tests.support import fp8_reference as reference
from tests.support.expert_calls import expert_rows, local_moe, nvlink_moe
from tests.support.fp8_emulation import emulate
from tests.support.moe_reference import moe_reference
from tests.support.simulated_workspace import SimulatedWorkspace

pytestmark = pytest.mark.usefixtures("emulated")

T, K, E, H, F = 7, 2, 3, 256, 128


@pytest.fixture
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in fp8 run on a CPU: casts by their reference, or by the interpreted kernels."""
    monkeypatch.setattr(transport, "_kernels_serve", lambda *given: False)
    emulate(monkeypatch.setattr, casts=getattr(request, "param", "torch") == "torch")


def make(outliers: bool = False) -> tuple[Tensor, list[Tensor], Tensor]:
    """ids [T, K], bf16 leaves (x, probs, w1, w2), grad [T, H]; expert 1 has no rows."""
    g = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.tensor([0, 2])[torch.randperm(2, generator=g)] for _ in range(T)])
    ids[0, 0] = -1
    shapes = [(T, H), (T, K), (E, 2 * F, H), (E, H, F), (T, H)]
    *leaves, grad = (torch.randn(*shape, generator=g) for shape in shapes)
    leaves[1], leaves[2], leaves[3] = leaves[1].abs(), leaves[2] * H**-0.5, leaves[3] * F**-0.5
    if outliers:
        leaves[0][:, 5] *= 200.0
        grad[:, 7] *= 200.0
    return ids, [leaf.bfloat16().requires_grad_() for leaf in leaves], grad.bfloat16()


def gradients(y: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    return [y.detach().float(), *(g.float() for g in torch.autograd.grad(y, leaves, grad))]


def gap(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def oracle(ids: Tensor, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    x, probs, w1, w2 = wide
    y = moe_reference(x, ids, probs, w1, w2, "swiglu")
    return gradients(y, wide, grad.float())


def cast(rows: Tensor) -> Tensor:
    """What stands for rows in fp8."""
    return reference.restore_rows(*reference.cast_rows(rows))


def cast_twice(rows: Tensor) -> Tensor:
    """An expert's rows [n, width], n up to 128: in fp8, cast again with a scale a feature."""
    padded = torch.nn.functional.pad(cast(rows), (0, 0, 0, 128 - len(rows)))
    return cast(padded.t()).t()


def by_the_recipe(
    ids: Tensor, leaves: list[Tensor], grad: Tensor, fp8_weight_grads: bool
) -> list[Tensor]:
    """y, dx, dprobs, dw1, dw2: expert by expert, products of restored fp8 operands in fp32."""
    x, probs, w1, w2 = (leaf.detach() for leaf in leaves)
    y, dx, dprobs = torch.zeros(T, H), torch.zeros(T, H), torch.zeros(T, K)
    dw1, dw2 = torch.zeros_like(w1).float(), torch.zeros_like(w2).float()
    for e in ids[ids >= 0].unique().tolist():
        token, choice = torch.nonzero(ids == e, as_tuple=True)
        fc1, fc2 = (
            reference.restore_weights(*reference.cast_weights(w[e : e + 1]))[0] for w in (w1, w2)
        )
        rows, p = cast(x[token]), probs[token, choice].float()
        h = (rows @ fc1.t()).bfloat16()
        gate, up = h.float().chunk(2, 1)
        value = torch.nn.functional.silu(gate) * up * p[:, None]
        y.index_add_(0, token, cast(value) @ fc2.t())
        dy = grad[token]
        da = (cast(dy) @ fc2).bfloat16()
        kept = reference.restore_companded(*reference.compand_rows(h))
        dh, a, dprobs[token, choice] = reference.swiglu_backward(kept, da, p)
        dx.index_add_(0, token, cast(dh) @ fc1)
        if fp8_weight_grads:
            dw1[e], dw2[e] = (
                cast_twice(dh).t() @ cast_twice(rows),
                cast_twice(dy).t() @ cast_twice(a),
            )
        else:
            dw1[e], dw2[e] = dh.t() @ rows, cast(dy).t() @ a
    return [y, dx, dprobs, dw1, dw2]


@pytest.mark.parametrize("fp8_weight_grads", [True, False])
@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize(
    "emulated", ["torch", pytest.param("kernels", marks=pytest.mark.interpreter)], indirect=True
)
def test_outputs_and_every_gradient_follow_the_recipe(
    emulated: None, outliers: bool, fp8_weight_grads: bool
) -> None:
    ids, leaves, grad = make(outliers)
    x, probs, w1, w2 = leaves
    y = local_moe(x, ids, probs, w1, w2, fp8=True, fp8_weight_grads=fp8_weight_grads)
    found = gradients(y, leaves, grad)
    expected = by_the_recipe(ids, leaves, grad, fp8_weight_grads)
    for value, right in zip(found, expected, strict=True):
        assert gap(value, right) < 0.012  # bf16's rounding, and casts that it turns over
    others = by_the_recipe(ids, leaves, grad, not fp8_weight_grads)
    assert min(gap(v, r) for v, r in zip(found[3:], others[3:], strict=True)) > 0.015
    errors = [gap(v, r) for v, r in zip(found, oracle(ids, leaves, grad), strict=True)]
    # fp8's rounding is 2^-4 at most, of both operands; dprobs and gradients see several of them.
    assert max(errors) < 0.09, errors
    plain = gradients(local_moe(x, ids, probs, w1, w2), leaves, grad)
    bf16 = [gap(v, r) for v, r in zip(plain, oracle(ids, leaves, grad), strict=True)]
    assert all(e > 2 * b for e, b in zip(errors, bf16, strict=True)), "this was not fp8"


@pytest.mark.interpreter
@pytest.mark.parametrize("capacity", [None, T * K])
def test_over_nvlink_the_same_numbers(capacity: int | None) -> None:
    ids, leaves, grad = make()
    expected = gradients(over_one_rank("local", ids, leaves), leaves, grad)
    y = over_one_rank("nvlink", ids, leaves, sent_rows=capacity is None, capacity=capacity)
    for value, right in zip(gradients(y, leaves, grad), expected, strict=True):
        assert gap(value, right) < 0.012


_RECOMPUTED = [(), ("rows",), ("hidden",), ("rows", "hidden")]


@pytest.mark.parametrize("fp8_weight_grads", [True, False])
@pytest.mark.parametrize("recompute", _RECOMPUTED, ids=str)
@pytest.mark.parametrize("over", ["local", pytest.param("nvlink", marks=pytest.mark.interpreter)])
def test_tokens_cast_before_they_are_dispatched_give_the_bits_of_rows_cast_afterwards(
    monkeypatch: pytest.MonkeyPatch, over: str, recompute: tuple[str, ...], fp8_weight_grads: bool
) -> None:
    """But for dW2 in bf16, and with recomputed rows dW1, which then come from bf16 rows."""
    ids, leaves, grad = make(outliers=True)

    def results(before: bool, leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
        for kind in (transport.LocalTransport, NvlinkTransport):
            monkeypatch.setattr(kind, "carries_packed_rows", before)
        settings = {"recompute": recompute, "fp8_weight_grads": fp8_weight_grads}
        y = over_one_rank(over, ids, leaves, **settings)
        return gradients(y, leaves, grad)

    found, after = results(True, leaves, grad), results(False, leaves, grad)
    exact = slice(5) if fp8_weight_grads else slice(3) if "rows" in recompute else slice(4)
    torch.testing.assert_close(found[exact], after[exact], rtol=0, atol=0)
    assert torch.equal(found[4], after[4]) == fp8_weight_grads
    # A cast of what was cast changes nothing: then every result is the same.
    x = cast(leaves[0].detach()).bfloat16().requires_grad_()
    grad = cast(grad).bfloat16()
    again = [results(before, [x, *leaves[1:]], grad) for before in (True, False)]
    torch.testing.assert_close(*again, rtol=0, atol=0)
    torch.testing.assert_close(found, again[0], rtol=0, atol=0)


def over_one_rank(
    over: str, ids: Tensor, leaves: list[Tensor], sent_rows: bool = False, **settings: Any
) -> Tensor:
    x, probs, w1, w2 = leaves
    if over == "local":
        return local_moe(x, ids, probs, w1, w2, fp8=True, **settings)
    workspace, schedule = SimulatedWorkspace(1).rank(0), Schedule(sent_rows=sent_rows)
    buffers = NvlinkBuffers(workspace, T, H, K, E, torch.bfloat16, schedule=schedule)
    return nvlink_moe(buffers, x, ids, probs.float(), w1, w2, fp8=True, **settings)


def test_no_tokens() -> None:
    _, leaves, _ = make()
    none = [leaves[0][:0].detach().requires_grad_(), leaves[1][:0].detach().requires_grad_()]
    ids = torch.zeros(0, K, dtype=torch.int64)
    y = over_one_rank("local", ids, [*none, *leaves[2:]])
    found = gradients(y, [*none, *leaves[2:]], torch.zeros_like(y))
    assert y.shape == (0, H) and not any(bool(value.any()) for value in found)


def test_what_is_kept_for_backward_takes_a_byte_a_value() -> None:
    ids, (x, probs, w1, w2), _ = make()
    total: dict[bool, int] = {}
    for fp8 in (False, True):
        saved: list[Tensor] = []

        def keep(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            local_moe(x, ids, probs, w1, w2, fp8=fp8)
        rows = {t.dtype for t in saved if t.numel() >= H * T}
        assert rows == ({torch.float8_e4m3fn, torch.int8} if fp8 else {torch.bfloat16})
        memory = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in saved}
        total[fp8] = sum(memory.values())
    # What lies between the values of packed rows: a 28th of them with H = 7168, half of them here.
    between = (T * K - 1) * (2 * packed_width(H) - H)
    assert total[True] - between < 0.55 * total[False]


def test_a_nan_or_an_infinity_in_a_token_reaches_that_tokens_output_alone() -> None:
    for bad in (float("nan"), float("inf")):
        ids, (x, probs, w1, w2), _ = make()
        with torch.no_grad():
            x[3, 200] = bad
        y = local_moe(x, ids, probs, w1, w2, fp8=True).detach()
        assert bool(y[3].isnan().all())
        assert bool(y[[t for t in range(T) if t != 3]].isfinite().all())


# ---- weight gradients in fp8: to whom they go, from which rows, and what chooses them

COUNTS = [5, 0, 130]


def rows_of(counts: list[int], width: int, seed: int) -> Tensor:
    x = torch.randn(sum(counts), width, generator=torch.Generator().manual_seed(seed))
    x[::3, ::40] *= 50.0
    return x


def exact(dy: Tensor, x: Tensor, counts: list[int]) -> Tensor:
    """dW [E, out, in] of rows as they were before any cast."""
    ends = list(itertools.accumulate(counts))
    spans = itertools.starmap(slice, itertools.pairwise([0, *ends]))
    return torch.stack([dy[rows].t() @ x[rows] for rows in spans])


def experts_of(fc: ExpertWeights) -> fp8_experts.Fp8Experts:
    return fp8_experts.Fp8Experts(fc, fc, resolve_activation("swiglu"), True, name="moe")


class Operands:
    """A projection of E experts, out 256, in 128, and its rows."""

    def __init__(self, counts: list[int], layout: str = "out_in") -> None:
        shape = (E, 256, 128) if layout == "out_in" else (E, 128, 256)
        self.weight = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        self.fc = ExpertWeights(self.weight, E, layout)
        self.experts = experts_of(self.fc)
        wide = rows_of(counts, 256, 0), rows_of(counts, 128, 1)
        dy, x = (Fp8Rows(*reference.cast_rows(rows)) for rows in wide)
        self.rows = dy, x, RowGroups.of_counts(counts)
        right = exact(*wide, counts)
        self.right = right.transpose(1, 2) if layout == "in_out" else right


@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("counts", [COUNTS, [0] * E])
def test_one_projection(counts: list[int], layout: str) -> None:
    given = Operands(counts, layout)
    (found,) = given.experts.weight_grads(given.fc, *given.rows)
    assert found.dtype == torch.bfloat16 and found.shape == given.weight.shape
    assert not bool(found[1].any())
    if sum(counts):
        # e4m3's rounding of both operands, 2^-4 at most and 0.026 in the mean square.
        assert 0.02 < gap(found.float(), given.right) < 0.05
    else:
        assert not bool(found.any())


@pytest.mark.parametrize("kind", ["fp32", "bf16", "strided"])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("counts", [COUNTS, [0] * E])
def test_main_grads_get_them_in_place(counts: list[int], overwrite: bool, kind: str) -> None:
    given = Operands(counts)
    (added,) = given.experts.weight_grads(given.fc, *given.rows)
    before = float(added.abs().max()) + 1.0
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    pitch = 130 if kind == "strided" else 128
    main_grads = torch.full((E, 256, pitch), before, dtype=dtype)[..., :128]
    parts = [w.requires_grad_() for w in given.weight.detach().unbind(0)]
    for part, main_grad in zip(parts, main_grads, strict=True):
        part.main_grad = main_grad  # type: ignore[attr-defined]
        part.overwrite_main_grad = overwrite  # type: ignore[attr-defined]
    fc = ExpertWeights(parts, E)
    experts_of(fc).add_to_main_grads(fc, *given.rows)
    expected = added.float() + (0.0 if overwrite else before)
    torch.testing.assert_close(main_grads.float(), expected, rtol=1e-2, atol=1e-2 * before)


def test_a_gradient_for_main_grads_of_fp32_is_not_rounded() -> None:
    given = Operands(COUNTS)
    given.weight.main_grad = torch.zeros(given.weight.shape)  # type: ignore[attr-defined]
    given.experts.add_to_main_grads(given.fc, *given.rows)
    main_grad: Tensor = given.weight.main_grad  # type: ignore[attr-defined]
    assert not torch.equal(main_grad, main_grad.bfloat16().float())


@pytest.mark.parametrize("recompute", _RECOMPUTED, ids=str)
def test_what_is_recomputed_gives_the_same_gradients(recompute: tuple[str, ...]) -> None:
    ids, leaves, grad = make()
    kept, again = (
        gradients(over_one_rank("local", ids, leaves, recompute=what), leaves, grad)
        for what in ((), recompute)
    )
    same = "hidden" not in recompute  # else fc1's output is not rounded to a byte
    for found, right in zip(again, kept, strict=True):
        assert torch.equal(found, right) if same else gap(found, right) < 0.06


@pytest.mark.parametrize("counts", [COUNTS, [0] * E])
def test_rows_without_probabilities_and_no_rows_at_all(counts: list[int]) -> None:
    _, (_, _, w1, w2), _ = make()
    found = []
    for probs in (None, torch.ones(sum(counts))):
        x = rows_of(counts, H, 7).bfloat16().requires_grad_()
        w1.grad = w2.grad = None
        y = expert_rows(x, probs, counts, w1, w2, fp8=True)
        y.backward(torch.ones_like(y))
        assert w1.grad is not None and w2.grad is not None
        assert not bool(w1.grad[1].any())
        assert bool(w1.grad.any()) == bool(sum(counts))
        found.append((w1.grad, w2.grad))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_the_setting_of_a_layer_and_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"hidden_size": 128, "ffn_hidden_size": 128, "num_experts": 2, "top_k": 2}

    def chosen(**settings: Any) -> bool:
        layer = MoELayer(shape | {"fp8_recipe": "blockwise"} | settings)  # type: ignore[arg-type]
        tensors: Any = dict.fromkeys(("x", "probs", "w1", "w2"))
        return layer._call(**tensors).fp8_weight_grads

    for own, process in itertools.product((None, "fp8", "bf16"), ("fp8", "bf16")):
        set_config(FluidConfig(moe_fp8_weight_grads=process))
        assert chosen(fp8_weight_grads=own) == ((own or process) == "fp8")
    set_config(FluidConfig())
    assert chosen()
    with pytest.raises(ConfigError, match="found 'fp32', allowed: fp8, bf16, or None"):
        MoEConfig.of(shape | {"fp8_weight_grads": "fp32"})
    with pytest.raises(ConfigError, match="moe_fp8_weight_grads"):
        FluidConfig(moe_fp8_weight_grads="fp16")
