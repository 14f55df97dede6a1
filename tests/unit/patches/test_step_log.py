"""The figures that training writes to TensorBoard: when, and tokens per expert on CPU ranks against
counts of Megatron's routing maps."""

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training import global_vars
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fluid.patches import step_log
from megatron_fluid.patches.step_log import TOKEN_COUNTS, StepLog, TokenCounts
from tests.support import tiny_gpt
from tests.support.launch import on_ranks

MICROBATCHES = 3
WORST, MEAN = (f"{of}tokens-per-expert-max-over-mean" for of in ("", "layer-mean-"))
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "capacity": {"moe_expert_capacity_factor": 0.5},
    "recomputed experts": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "another's experts": {},
}


def _ratio(counts: Tensor) -> float:
    return float(counts.max() / counts.double().mean())


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_tokens_per_expert_are_those_of_the_routing_maps(rank: int, ranks: int) -> None:
    tiny_gpt.parallel(expert_model_parallel_size=ranks)
    for case, overrides in CASES.items():
        with tiny_gpt.plug_in(True, moe_backend="auto"):
            config = tiny_gpt.config_of(num_moe_experts=8, **overrides)
            layers = [tiny_gpt.moe_layer(config, seed=seed) for seed in (1, 2)]
            if case == "another's experts":
                for layer in layers:  # a hook keeps them Megatron's, behind this package's exchange
                    layer.experts.register_forward_hook(lambda *_: None)
            counts = [torch.zeros(8, dtype=torch.int64) for _ in layers]
            generator = torch.Generator().manual_seed(rank)
            TOKEN_COUNTS.begin(True)
            for microbatch in range(MICROBATCHES):
                x = torch.randn(16, 2, 32, generator=generator, requires_grad=True)
                for layer, count in zip(layers, counts, strict=True):
                    with torch.no_grad():
                        layer(x)  # an evaluation is not counted
                        count += layer.route(x)[1].sum(0)
                    if microbatch:  # counted once although its forward runs twice
                        y = checkpoint(lambda x, at=layer: at(x)[0], x, use_reentrant=True)
                    else:
                        y = layer(x)[0]
                    y.sum().backward()
            ratios = [_ratio(count) for count in counts]
            figures, served = TOKEN_COUNTS.figures(), type(layers[0].token_dispatcher).__name__
            assert figures[WORST] == pytest.approx(max(ratios)), case
            assert figures[MEAN] == pytest.approx(sum(ratios) / 2), case
            assert (served == "FluidTokenDispatcher") == (case == "another's experts"), case
            TOKEN_COUNTS.begin(False)
            del layer, layers, y
            gc.collect()


@pytest.mark.parametrize("captured", [False, True])
def test_tokens_per_expert_are_those_of_the_iteration_that_is_written(
    captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[int, dict[str, float]] = {}
    counts, log, layer = TokenCounts(), StepLog(), torch.nn.Identity()
    monkeypatch.setattr(step_log, "TOKEN_COUNTS", counts)
    monkeypatch.setattr(step_log, "_figures", lambda *_: {})
    monkeypatch.setattr(
        step_log, "write_scalars", lambda figures, iteration: written.update({iteration: figures})
    )
    settings = SimpleNamespace(tensorboard_log_interval=2, cuda_graph_impl="none")
    if captured:
        settings.cuda_graph_impl = "full_iteration"

    def train(iterations: range) -> list[bool]:
        recorded = []
        for settings.curr_iteration in iterations:
            log.begin(settings)
            recorded.append(counts.recording)
            if counts.recording:  # a capture asks once, and its replays always add
                ids = torch.tensor([[0, 1], [0, settings.curr_iteration % 4], [-1, 3]])
                counts.add(layer, ids, 4)
        return recorded

    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: None)
    assert train(range(3)) == [False] * 3, "nobody writes"
    monkeypatch.setattr(global_vars, "get_tensorboard_writer", lambda: "a writer")
    assert train(range(3, 8)) == ([True] * 5 if captured else [True, False, True, False, True])
    # Iterations 4 and 6 began at 3 and 5: three tokens of five, and two.
    assert {done: figures[WORST] for done, figures in written.items() if figures} == {
        4: pytest.approx(2 * 4 / 5), 6: pytest.approx(2 * 4 / 5),
    }  # fmt: skip


def test_steps_of_another_loop_than_megatrons_are_not_logged() -> None:
    log = StepLog()
    for _ in range(2):
        log.begin(SimpleNamespace(tensorboard_log_interval=1))
    assert not log._seconds
