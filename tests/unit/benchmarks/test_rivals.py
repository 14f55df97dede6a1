"""Layers of other libraries get the weights of the layer that they are compared with, each in its
own layout."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist

from benchmarks.cases.all_to_all import Clock
from benchmarks.cases.exchange_rivals import _deepep_capacity
from benchmarks.cases.moe import MoECase
from benchmarks.cases.moe_rivals import LigerCuteMoE, SonicMoE, TorchGroupedMoE, missing
from benchmarks.cases.moe_variants import settings_of
from benchmarks.suites.grouped_gemm import _check
from tests.support.moe_reference import moe_reference

CASE, CPU = MoECase(hidden=16, ffn=8, experts=4, top_k=2), torch.device("cpu")


def test_rivals_take_the_weights_of_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    w1, w2 = torch.randn(4, 16, 16).bfloat16(), torch.randn(4, 16, 8).bfloat16()
    gate, up = w1.chunk(2, dim=1)
    sonic = SonicMoE(CASE, CPU)
    sonic.take(w1, w2)
    assert torch.equal(sonic.weight1[:, 0::2], gate) and torch.equal(sonic.weight1[:, 1::2], up)
    cute = LigerCuteMoE(CASE, CPU)
    cute.take(w1[2:], w2[2:])
    assert torch.equal(cute.weight1, gate[2:]) and torch.equal(cute.up, up[2:])
    assert cute.weight1.is_contiguous() and torch.equal(cute.weight2, w2[2:])
    assert {name for name, _ in cute.named_parameters()} == {
        *("router.weight", "weight1", "up", "weight2")
    }


def test_torchs_grouped_gemm_computes_what_its_words_say() -> None:
    layer = TorchGroupedMoE(CASE, CPU)
    layer.take(torch.randn(4, 16, 16) * 0.3, torch.randn(4, 16, 8) * 0.3)
    x = torch.randn(6, 16).bfloat16()
    ids, probs = torch.rand(6, 4).topk(2).indices, torch.rand(6, 2)
    weights = layer.weight1.float(), layer.weight2.float()
    right = moe_reference(x.float(), ids, probs, *weights, "swiglu")
    torch.testing.assert_close(layer.experts(x, ids, probs).float(), right, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(("mode", "gap"), [("fc1", torch.nan), ("fc1 main_grad", 1.0)])
def test_a_grouped_gemm_that_computes_nothing_does_not_pass(mode: str, gap: float) -> None:
    out = torch.zeros(3)
    found = _check({(mode, "torch"): lambda: out.fill_(1), (mode, "te"): lambda: out}, {})
    torch.testing.assert_close(found[mode, "te"], gap, equal_nan=True)


def test_megatrons_variants_have_the_settings_that_their_names_say() -> None:
    both = settings_of("megatron_te_deepep") | settings_of("megatron_te_grouped_weight")
    assert len(both) == 3 and both == settings_of("megatron_te_deepep_grouped_weight")


def test_a_library_that_is_missing_is_named() -> None:
    assert missing("sonic") == "sonicmoe is not importable (docs/rivals.md)"
    assert missing("torch_grouped") is None is missing("megatron_te_alltoall")


def test_variants_of_decoding_are_launched_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, called, turns = Clock(CPU, 10), list[str](), list[str]()
    monkeypatch.setattr(clock, "meet", lambda: turns.append(called[-1]))
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    calls = {name: {"dispatch": lambda name=name: called.append(name)} for name in "ab"}
    samples = clock.in_turns(calls)
    assert turns == list("abbaabbaab")
    assert {key: len(each) for key, each in samples.items()} == {
        (name, "dispatch"): 10 for name in "ab"
    }


def test_an_eager_sample_is_the_mean_of_calls_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, called = Clock(CPU, 10), list[int]()
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(clock, "meet", lambda: None)
    monkeypatch.setattr(clock, "on_gpu", True)

    def events(pieces: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
        return [[float(piece() or 40.0) for piece in pieces] for _ in range(rounds)]

    monkeypatch.setattr(clock, "_events", events)
    assert clock.in_a_row(lambda: called.append(1), 3) == [2.0] * 3
    assert len(called) == (10 + 3) * 20, "ten samples to warm up"


@pytest.mark.parametrize(("tokens", "ranks", "bound"), [(1, 2, 2), (1, 1, 4), (5, 4, 5), (3, 6, 4)])
def test_deepeps_bound_on_tokens_is_the_least_that_it_takes(
    tokens: int, ranks: int, bound: int
) -> None:
    assert _deepep_capacity(tokens, ranks) == bound
