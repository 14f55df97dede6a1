"""The parts of an MoE layer alone: activations, grouped GEMMs, router, plans."""

import dataclasses
from typing import get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_fluid.comm.failed_waits import ErrorWords
from megatron_fluid.comm.p2p_rounds import shared_rounds
from megatron_fluid.errors import ConfigError
from megatron_fluid.moe import activations, experts, permute, router
from megatron_fluid.moe.config import MoEConfig, MoEConfigDict
from megatron_fluid.moe.expert_weights import ExpertWeights, RowGroups, grouped_product
from megatron_fluid.moe.rounds.plan import ExactPlan
from megatron_fluid.moe.rounds.transport import RoundsTransport
from tests.support.expert_calls import overlapped_moe

F64 = torch.float64


def normal(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=F64
    ).requires_grad_(grad)


# ---- activations


def test_activation_formulas() -> None:
    g, u = normal(5, 4), normal(5, 4, seed=1)
    h = torch.cat([g, u], dim=1)
    f = torch.nn.functional
    for name, value in {
        "swiglu": f.silu(g) * u,
        "geglu": f.gelu(g) * u,
        "geglu_tanh": f.gelu(g, approximate="tanh") * u,
    }.items():
        torch.testing.assert_close(activations.ACTIVATIONS[name].forward(h), value)
    torch.testing.assert_close(
        activations.ACTIVATIONS["relu2"].forward(h), torch.clamp(h, min=0) ** 2
    )


def test_activations_from_callables() -> None:
    f = torch.nn.functional
    resolve = activations.resolve_activation
    assert resolve(f.gelu) is activations.ACTIVATIONS["gelu"]
    assert resolve(f.silu, gated=True) is activations.ACTIVATIONS["swiglu"]
    assert resolve(f.glu).gated and not resolve(f.mish).gated and resolve(f.mish, gated=True).gated
    assert resolve(torch.relu, gated=True).gated
    with pytest.raises(ConfigError, match="activation: found .*PReLU.*without parameters"):
        resolve(torch.nn.PReLU())
    with pytest.raises(ConfigError, match="activation: found 'swish', allowed: geglu.*swiglu"):
        resolve("swish")
    with pytest.raises(ConfigError, match="activation: found 3"):
        resolve(3)  # type: ignore[arg-type]
    slope = torch.nn.Parameter(torch.ones(()))
    with pytest.raises(ConfigError, match="activation: found .*lambda.*without parameters"):
        resolve(lambda h: h * slope)


# ---- grouped GEMMs

counts_of = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def held(weight: Tensor, how: str) -> ExpertWeights:
    """A weight [El, out, in] in one of the layouts."""
    number, _, width = weight.shape
    transposed = weight.transpose(1, 2).contiguous()
    if how == "stacked":
        return ExpertWeights(weight, number)
    if how == "strided":
        return ExpertWeights(transposed.transpose(1, 2), number)
    if how == "tuple":
        return ExpertWeights([w.clone() for w in weight], number)
    if how == "neighbours":
        return ExpertWeights(list(weight.clone().unbind(0)), number)
    if how == "in_out":
        return ExpertWeights(transposed, number, "in_out")
    if how == "in_out tuple":
        return ExpertWeights([w.clone() for w in transposed], number, "in_out")
    assert how == "folded"
    return ExpertWeights(transposed.reshape(width, -1), number, "in_out", in_width=width)


@pytest.mark.parametrize(
    "how", ["stacked", "strided", "tuple", "neighbours", "in_out", "in_out tuple", "folded"]
)
@settings(deadline=None)
@given(counts=counts_of)
def test_grouped_gemms(how: str, counts: list[int]) -> None:
    number, rows = len(counts), sum(counts)
    weight, x, dy = (
        normal(number, 5, 3),
        normal(rows, 3, seed=1, grad=True),
        normal(rows, 5, seed=2),
    )
    fc, groups = held(weight, how), RowGroups.of_counts(counts)
    assert (fc.out_width, fc.in_width) == (5, 3)
    reference = weight.clone().requires_grad_()
    expert_of = torch.repeat_interleave(torch.arange(number), torch.tensor(counts))
    y = torch.einsum("ni,noi->no", x, reference[expert_of])
    y.backward(dy)
    product = grouped_product
    torch.testing.assert_close(product(x.detach(), fc.forward_matrices, groups), y.detach())
    torch.testing.assert_close(product(dy, fc.backward_matrices, groups), x.grad)
    gradients = experts.weight_grads(fc, dy, x.detach(), groups)
    assert [g.shape for g in gradients] == [p.shape for p in fc.params]
    assert reference.grad is not None
    wanted = held(reference.grad, how).params
    torch.testing.assert_close(gradients, wanted)


def test_neighbours_in_memory_are_one_stack() -> None:
    flat = normal(4 * 6 + 3 * 2)
    apart = [flat[i * 8 : i * 8 + 6].view(2, 3) for i in range(3)]
    fc = ExpertWeights(apart, 3)
    assert fc.stack is not None and fc.stack.data_ptr() == flat.data_ptr()
    assert all(torch.equal(fc.stack[i], apart[i]) for i in range(3))
    assert ExpertWeights(apart[::-1], 3).stack is None
    assert ExpertWeights([apart[0], apart[2], apart[1]], 3).stack is None
    assert ExpertWeights([apart[0], apart[1], normal(2, 3)], 3).stack is None


def test_weights_of_another_dtype_at_the_same_address_are_looked_at_again() -> None:
    memory = torch.arange(32, dtype=torch.float32)
    wide, narrow = memory[8:16].view(2, 2, 2), memory.view(torch.bfloat16)[16:24].view(2, 2, 2)
    kept = ExpertWeights(wide, 2).kept
    assert kept.fits(wide) and not kept.fits(narrow)


def test_main_grads_of_another_dtype_at_the_same_addresses_are_checked_again() -> None:
    weights, memory = [torch.nn.Parameter(normal(2, 4)) for _ in range(3)], torch.zeros(3, 2, 4)
    kept, checked = None, []
    for dtype in (torch.float32, torch.bfloat16):
        for weight, place in zip(weights, memory.view(dtype), strict=True):
            weight.main_grad = place[:, :4]  # type: ignore[attr-defined]
        fc = ExpertWeights(weights, 3, kept=kept)
        kept = fc.kept
        checked.append(fc.kernel_grads(lambda grads: grads[0].dtype == torch.float32)[1].fit)
    assert checked == [True, False]


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="three dimensions, the first being 2"):
        ExpertWeights(normal(3, 4, 5), 2)
    with pytest.raises(ConfigError, match="2 matrices of one shape"):
        ExpertWeights([normal(4, 5)], 2)
    with pytest.raises(ConfigError, match="2 matrices of one shape"):
        ExpertWeights([normal(4, 5), normal(5, 4)], 2)
    with pytest.raises(ConfigError, match="layout: found 'rows'"):
        ExpertWeights(normal(2, 4, 5), 2, "rows")
    with pytest.raises(ConfigError, match="contiguous"):
        ExpertWeights(normal(5, 7), 2, "in_out", in_width=5)


# ---- router


def test_softmax_after_and_before_the_choice() -> None:
    logits = normal(20, 6)
    after, before = router.route(logits, 3), router.route(logits, 3, pre_softmax=True)
    assert torch.equal(after.ids, before.ids) and torch.equal(after.ids, logits.topk(3).indices)
    torch.testing.assert_close(after.probs.sum(1), torch.ones(20, dtype=F64))
    torch.testing.assert_close(before.probs, logits.softmax(1).gather(1, before.ids))
    torch.testing.assert_close(after.scores, logits.softmax(1))


def test_sigmoid_scores() -> None:
    logits, bias = normal(20, 6), normal(6, seed=1)
    plain = router.route(logits, 2, "sigmoid", scaling=2.5)
    gates = torch.sigmoid(logits)
    chosen = gates.gather(1, plain.ids)
    torch.testing.assert_close(plain.probs, 2.5 * chosen / chosen.sum(1, keepdim=True))
    torch.testing.assert_close(
        router.route(logits, 1, "sigmoid").probs, gates.max(1, keepdim=True).values
    )
    biased = router.route(logits, 2, "sigmoid", expert_bias=bias)
    assert torch.equal(biased.ids, (gates + bias).topk(2).indices)
    raw = gates.gather(1, biased.ids)
    # The bias chooses, and weighs nothing.
    torch.testing.assert_close(biased.probs, raw / raw.sum(1, keepdim=True))


def test_low_precision_logits_are_scored_in_fp32() -> None:
    assert router.route(normal(4, 4).bfloat16(), 2).probs.dtype == torch.float32
    assert router.route(normal(4, 4), 2).probs.dtype == F64


def test_load_balancing_loss() -> None:
    balanced = torch.eye(4, dtype=F64) * 50
    assert router.load_balancing_loss(router.route(balanced, 1), 0.3).item() == pytest.approx(0.3)
    collapsed = torch.zeros(8, 4, dtype=F64)
    collapsed[:, 2] = 50
    assert router.load_balancing_loss(router.route(collapsed, 1), 1.0).item() == pytest.approx(4.0)
    logits = normal(10, 4, grad=True)
    routing_of = router.route(logits, 2)
    loss = router.load_balancing_loss(routing_of, 0.1)
    shares = torch.bincount(routing_of.ids.reshape(-1), minlength=4).double() / 20
    torch.testing.assert_close(loss, 0.1 * 4 * (shares * logits.softmax(1).mean(0)).sum())
    nothing = router.route(torch.empty(0, 4, dtype=F64), 2)
    assert router.load_balancing_loss(nothing, 1.0).item() == 0.0


def balancing_router() -> router.TopKRouter:
    module = router.TopKRouter(5, 4, 2, aux_loss_coefficient=0.7, dtype=F64)
    with torch.no_grad():
        module.weight.copy_(normal(4, 5, seed=1))
    return module


def test_the_loss_has_the_weight_that_it_is_given() -> None:
    tokens, found = normal(10, 5), []
    for scale in (1.0, 1024.0):
        module = balancing_router()
        router.set_aux_loss_scale(scale)
        try:
            (module(tokens).probs * 0.0).sum().backward()
        finally:
            router.set_aux_loss_scale(1.0)
        assert module.weight.grad is not None
        found.append(module.weight.grad)
    assert found[0].any() and torch.equal(found[1], 1024.0 * found[0])


def test_the_loss_is_trained_through_the_probabilities() -> None:
    tokens, upstream, module = normal(10, 5), normal(10, 2, seed=2), balancing_router()
    (module(tokens).probs * upstream).sum().backward()
    reference = module.weight.detach().clone().requires_grad_()
    routing_of = router.route(tokens @ reference.t(), 2)
    ((routing_of.probs * upstream).sum() + router.load_balancing_loss(routing_of, 0.7)).backward()
    torch.testing.assert_close(module.weight.grad, reference.grad)
    assert module.last_aux_loss is not None and not module.last_aux_loss.requires_grad
    module.eval()
    module.weight.grad = None
    (module(tokens).probs * upstream).sum().backward()
    assert module.weight.grad is not None and reference.grad is not None
    assert not torch.allclose(module.weight.grad, reference.grad), (
        "no balancing outside of training"
    )
    assert module.last_aux_loss is None


def test_router_refusals() -> None:
    with pytest.raises(ConfigError, match="top_k: found 5, allowed: 1 to 4"):
        router.route(normal(3, 4), 5)
    with pytest.raises(ConfigError, match="score_function: found 'argmax'"):
        router.TopKRouter(4, 4, 2, "argmax")
    with pytest.raises(ConfigError, match="expert_bias"):
        router.route(normal(3, 4), 2, expert_bias=normal(4))


# ---- plans


def permutation_of(ids: Tensor, num_experts: int) -> permute.Permutation:
    keys, counts = permute.count_choices(ids, num_experts)
    return permute.Permutation.of(keys, ids.shape).first(int(counts.sum()))


@settings(deadline=None)
@given(st.integers(0, 9), st.integers(1, 4), st.integers(0, 1000))
def test_moves_to_rows_and_back_are_transposes(tokens: int, top_k: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 5, (tokens, top_k), generator=generator)
    permutation = permutation_of(ids, 5)
    chosen = [t * top_k + k for e in range(5) for t, k in (ids == e).nonzero().tolist()]
    x = normal(tokens, 3, seed=seed, grad=True)
    rows = permute.rows_of_tokens(x, permutation)
    assert torch.equal(rows, x[[choice // top_k for choice in chosen]])
    y = normal(len(chosen), 3, seed=seed + 1, grad=True)
    back = permute.sum_of_rows(y, permutation)
    assert back.shape == x.shape
    # <P x, y> = <x, P^T y>, in value and in both gradients
    torch.testing.assert_close((rows * y.detach()).sum(), (x.detach() * back).sum())
    rows.backward(y.detach())
    back.backward(x.detach())
    torch.testing.assert_close(x.grad, back.detach())
    torch.testing.assert_close(y.grad, rows.detach())
    probs = normal(tokens, top_k, seed=seed + 2)
    of_rows = permutation.gather_choices(probs)
    assert torch.equal(of_rows, probs.reshape(-1)[chosen])
    assert torch.equal(permutation.spread_choices(of_rows), probs.where(ids >= 0, 0))


def test_sums_of_low_precision_rows_are_wide() -> None:
    permutation = permutation_of(torch.arange(8).view(1, 8), 8)
    rows = torch.tensor([256.0, 1, 1, 1, 1, 1, 1, 1]).bfloat16().view(8, 1)
    found = permute.sum_of_rows(rows, permutation).item()
    assert found == torch.tensor(263.0).bfloat16().item()


def test_what_the_host_reads_is_on_the_cpu_whatever_the_default_device() -> None:
    cpu = torch.device("cpu")
    with torch.device("meta"):  # of memory that cannot be pinned, as a GPU's
        plan = ExactPlan(0, ((1, 2),), ((1, 2),))
        assert plan.recv_offsets(0, cpu).device == cpu
        assert RowGroups.of_counts([1, 2]).offsets.device == cpu
        assert ErrorWords(0, 2, cpu, 1.0, []).words.device == cpu


def test_plans_that_contradict_themselves() -> None:
    with pytest.raises(ConfigError, match="both be"):
        ExactPlan(0, ((1, 2),), ((1, 2), (0, 0)))
    with pytest.raises(ConfigError, match="rank: found 2"):
        ExactPlan(2, ((1,), (2,)), ((1,), (2,)))
    with pytest.raises(ConfigError, match="sends \\(1,\\) rows to its own experts"):
        ExactPlan(0, ((1,), (2,)), ((3,), (2,)))
    with pytest.raises(ConfigError, match="num_experts: found 6, allowed: a multiple of the 4"):
        permute.local_experts(6, 4)


def test_a_gradient_that_was_sent_is_let_go_while_dx_travels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backward, wait = RoundsTransport.backward, RoundsTransport.wait_returning
    sent: list[StorageWeakRef] = []
    let_go: list[bool] = []

    def watched(self: RoundsTransport, grad: Tensor, keep: bool) -> object:
        sent.append(StorageWeakRef(grad.untyped_storage()))
        return backward(self, grad, keep)

    def waited(self: RoundsTransport) -> None:
        let_go.append(sent[0].expired())
        wait(self)

    monkeypatch.setattr(RoundsTransport, "backward", watched)
    monkeypatch.setattr(RoundsTransport, "wait_returning", waited)
    ids, rounds = torch.tensor([[0, 1], [1, 2]]), shared_rounds(None)
    x, probs = normal(2, 8, seed=1, grad=True), normal(2, 2, seed=2)
    weights = normal(3, 8, 8, seed=3, grad=True), normal(3, 8, 4, seed=4, grad=True)
    plan = ExactPlan.from_topk(ids, 3, rounds)
    overlapped_moe(x, probs, plan, *weights, "swiglu", rounds).sum().backward()
    assert let_go[0]


def test_layer_settings() -> None:
    good = {"hidden_size": 8, "ffn_hidden_size": 16, "num_experts": 4, "top_k": 2}
    assert MoEConfig.of(good).activation == "swiglu"
    with pytest.raises(ConfigError, match="config: found 'experts', allowed: hidden_size"):
        MoEConfig.of({**good, "experts": 3})
    with pytest.raises(ConfigError, match="found 'topk', allowed: hidden.*; did you mean top_k.$"):
        MoEConfig.of({**good, "topk": 3})
    assert get_type_hints(MoEConfigDict) == get_type_hints(MoEConfig)
    needed = {f.name for f in dataclasses.fields(MoEConfig) if f.default is dataclasses.MISSING}
    assert MoEConfigDict.__required_keys__ == needed
    with pytest.raises(ConfigError, match="top_k not found"):
        MoEConfig.of({k: v for k, v in good.items() if k != "top_k"})
    with pytest.raises(ConfigError, match="hidden_size: found 0"):
        MoEConfig.of({**good, "hidden_size": 0})
    for name, wrong, allowed in (
        ("hidden_size", "8", "an integer"),
        ("hidden_size", True, "an integer"),
        ("shared_ffn_hidden_size", 2.5, "an integer"),
        ("shared_ffn_hidden_size", -1, "an integer of at least 0"),
        ("dx_chunks", 0, "an integer of at least 1, or None"),
        ("dx_chunks", 2.0, "an integer, or None"),
        ("dx_chunks", 1025, "1 to 1024, or None"),
        ("pre_softmax", "no", "True or False"),
        ("graph", 1, "True or False"),
        ("scaling", float("nan"), "a finite number, or None"),
        ("scaling", -2.5, "a number above 0, or None"),
        ("router_dtype", ["fp32"], "a text, or None"),
        ("backend", "megatron", "auto, nvlink, hierarchical, rounds, local, or None"),
        ("capacity_factor", 0.0, "a number above 0, or None"),
        ("capacity_factor", "2", "a finite number, or None"),
        ("recompute", ("weights",), "some of rows, hidden, or None"),
        ("recompute", True, "some of rows, hidden, or None"),
        ("batch_invariant", "on", "True or False, or None"),
        ("aux_loss_coefficient", None, "a finite number"),
        ("aux_loss_coefficient", -1.0, "0 or more"),
        ("init_std", float("nan"), "a finite number"),
    ):
        with pytest.raises(ConfigError, match=f"{name}: found .*, allowed: {allowed}"):
            MoEConfig.of({**good, name: wrong})
