"""Calls of the inference layer that raise: what is named, and that the next call works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fluid import MoELayer
from megatron_fluid.errors import ConfigError
from megatron_fluid.low_latency import AllToAllConfig, InferenceMoELayer
from tests.support.launch import HANG_S, on_ranks, run_ranks_outcomes

_CONFIG = {
    "hidden_size": 16, "ffn_hidden_size": 12, "num_experts": 4, "top_k": 2,
    "shared_ffn_hidden_size": 8, "init_std": 0.3,
}  # fmt: skip


def _layer(**changes: Any) -> InferenceMoELayer:
    training = MoELayer(_CONFIG, dist.group.WORLD, dtype=torch.bfloat16)
    return InferenceMoELayer.of(training, max_num_tokens=8, **changes)


def _tokens(rank: int) -> Tensor:
    return torch.randn(5, 16, generator=torch.Generator().manual_seed(rank)).bfloat16()


class Broken(RuntimeError):
    """What a part of the layer raises."""


def _fails(*_: Any) -> Tensor:
    raise Broken("once")


@pytest.mark.parametrize("batch_invariant", [False, True])
@on_ranks(2)
def test_after_an_error_on_all_ranks_the_next_call_works(
    rank: int, world: int, batch_invariant: bool
) -> None:
    layer, tokens = _layer(batch_invariant=batch_invariant), _tokens(rank)
    wanted = layer(tokens)
    for name, output in (
        ("shared_expert", _fails),
        ("_experts", _fails),
        ("shared_expert", lambda x: x[:, :3]),
        ("shared_expert", lambda x: x.float()),
        ("shared_expert", lambda x: x.to("meta")),
        ("shared_expert", lambda x: None),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(layer, name, output)
            with pytest.raises((Broken, ConfigError)) as caught:
                layer(tokens)
        if output is not _fails:
            assert "output of shared_expert: found" in str(caught.value)
        assert torch.equal(layer(tokens), wanted)
    with pytest.MonkeyPatch.context() as patch:  # of the receive half itself
        patch.setattr(layer.all_to_all._transport, "dispatch_receive", _fails)
        layer.all_to_all._known.clear()
        with pytest.raises(Broken):
            layer(tokens)
    layer.all_to_all._known.clear()
    assert torch.equal(layer(tokens), wanted)
    layer.destroy()


@on_ranks(2)
def test_an_error_of_one_ranks_shared_expert_leaves_the_other_in_step_and_with_its_result(
    rank: int, world: int
) -> None:
    layer, tokens = _layer(), _tokens(rank)
    wanted, shared_expert = layer(tokens), layer.shared_expert
    if rank:
        layer.shared_expert = _fails
        with pytest.raises(Broken):
            layer(tokens)
        layer.shared_expert = shared_expert
    else:
        assert torch.equal(layer(tokens), wanted)
    assert torch.equal(layer(tokens), wanted)


def _one_rank_fails(rank: int, world: int, part: str) -> None:
    layer, tokens = _layer(), _tokens(rank)
    layer(tokens)
    if rank:
        setattr(layer, part, _fails)
    layer(tokens)
    layer(tokens)


@pytest.mark.parametrize("part", ["shared_expert", "_experts"])
def test_the_error_of_one_rank_ends_the_other(part: str) -> None:
    other, failed = run_ranks_outcomes(_one_rank_fails, 2, part, grace_s=HANG_S)
    assert failed.error is not None and "Broken: once" in failed.error
    assert other.error is not None and "rank 1 raised Broken: once" in other.error, other.stacks


@on_ranks(1)
def test_an_argument_that_does_not_fit_is_named(rank: int, world: int) -> None:
    layer, tokens = _layer(), _tokens(rank)
    ids, probs = torch.zeros(5, 2, dtype=torch.int32), torch.ones(5, 2)
    bound = torch.tensor([4], dtype=torch.int32)
    calls: list[tuple[str, Callable[[], object]]] = [
        *(
            ("tokens", lambda wrong=wrong: layer(wrong))
            for wrong in (
                tokens[:, :8],
                tokens[None],
                tokens[0, 0],
                tokens.repeat(2, 1),
                None,
                tokens.to("meta"),
                tokens.float(),
            )
        ),
        ("routing: ids", lambda: layer(tokens, (None, None))),
        ("routing", lambda: layer(tokens, (ids,))),
        ("routing", lambda: layer(tokens, ids)),
        ("routing: ids", lambda: layer(tokens, (ids[:4], probs))),
        ("routing: ids", lambda: layer(tokens, (ids.float(), probs))),
        ("routing: probs", lambda: layer(tokens, (ids, probs[:, :1]))),
        ("routing: probs", lambda: layer(tokens, (ids, probs.long()))),
        ("routing: probs", lambda: layer(tokens, (ids, probs.to("meta")))),
        ("bound_m", lambda: layer(tokens, bound_m=1)),
        ("bound_m", lambda: layer(tokens, (ids, probs), bound.float())),
        ("bound_m", lambda: layer(tokens, (ids, probs), bound[0])),
    ]
    for known in (False, True):
        for name, call in calls:
            with pytest.raises(ConfigError, match=f"^{name}: found"):
                call()
        if not known:  # calls like them, but for the argument that does not fit
            for routing in (None, (ids, probs), [ids.t().contiguous().t(), probs.bfloat16()]):
                for limit in (None, bound):
                    assert layer(tokens, routing, limit).shape == tokens.shape  # type: ignore[arg-type]
    layer.destroy()


@on_ranks(1)
def test_a_setting_of_a_wrong_type_is_named(rank: int, world: int) -> None:
    wrong = {"rank": (0.0,), "world_size": (1.0,), "internode": ("no",), "timeout_s": ("3", True)}
    wrong |= {"domain_size": (1.0, "1", 0)}
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        sizes = {"rank": 0, "world_size": 1, "internode": True, name: value}
        with pytest.raises(ConfigError, match=f"^{name}: found {value!r}"):
            AllToAllConfig(8, 4, 2, dp_size=1, hidden_dim=16, hidden_dim_bytes=32,
                           hidden_dim_scale_bytes=0, **sizes)  # fmt: skip
