"""Weight gradients of fp8 experts in fp8 without a GPU: to whom they go, from which rows, and that
the setting chooses them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid import MoEConfig, MoELayer
from megatron_fluid.config import FluidConfig, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fp8_grouped_gemm.launch import Fp8Rows
from megatron_fluid.moe import fp8_experts
from megatron_fluid.moe.activations import resolve_activation
from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups
from tests.support import fp8_reference as reference
from tests.support.expert_calls import expert_rows, local_moe
from tests.unit.moe.test_fp8_experts import H, emulated, gap, make

__all__ = ["emulated"]

pytestmark = pytest.mark.usefixtures("emulated")

COUNTS = [5, 0, 130]
E = len(COUNTS)


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


def gradients_of(recompute: tuple[str, ...] = (), **settings: Any) -> Any:
    ids, (x, probs, w1, w2), grad = make()
    y = local_moe(x, ids, probs, w1, w2, fp8=True, recompute=recompute, **settings)
    y.backward(grad)
    return [leaf.grad.float() for leaf in (x, probs, w1, w2)]


@pytest.mark.parametrize("recompute", [(), ("hidden",), ("rows",), ("rows", "hidden")])
def test_what_is_recomputed_gives_the_same_gradients(recompute: tuple[str, ...]) -> None:
    kept, again = gradients_of(), gradients_of(recompute)
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

    try:
        for own, process in itertools.product((None, "fp8", "bf16"), ("fp8", "bf16")):
            set_config(FluidConfig(moe_fp8_weight_grads=process))
            assert chosen(fp8_weight_grads=own) == ((own or process) == "fp8")
        set_config(FluidConfig())
        assert chosen()
    finally:
        set_config(None)
    with pytest.raises(ConfigError, match="found 'fp32', allowed: fp8, bf16, or None"):
        MoEConfig.of(shape | {"fp8_weight_grads": "fp32"})
    with pytest.raises(ConfigError, match="moe_fp8_weight_grads"):
        FluidConfig(moe_fp8_weight_grads="fp16")
