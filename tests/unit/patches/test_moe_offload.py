"""Megatron's fine-grained activation offloading of experts that are ours: its own manager, on a
CPU, with the same bits as without."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from megatron.core.pipeline_parallel import fine_grained_activation_offload as offloading
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface as Offloading,
)
from megatron.core.pipeline_parallel.fine_grained_activation_offload import PipelineOffloadManager

from megatron_fluid.config import FluidConfig
from megatron_fluid.patches.moe import layer as moe_layer
from megatron_fluid.patches.moe import offload, recompute
from megatron_fluid.patches.moe.recompute import recompute_of
from tests.support import tiny_gpt
from tests.support.launch import run_ranks

SWIGLU: dict[str, Any] = {}
BIASED: dict[str, Any] = {
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation_func": F.gelu,
}
RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]}
# Backend, fields of the FluidConfig, settings of the model.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "local": ("local", {}, SWIGLU),
    "local, biases and moe_act recomputed": ("local", {}, BIASED | RECOMPUTED),
    "local, all recomputed": ("local", {"moe_recompute": "both"}, BIASED),
    "local, deferred": ("local", {"defer_weight_grads": True}, SWIGLU),
    "experts": ("experts", {}, BIASED | RECOMPUTED),
    "experts, hidden recomputed": ("experts", {"moe_recompute": "hidden"}, SWIGLU),
    "phase by phase": (
        "local",
        {},
        {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    ),
}
BOTH = ["expert_fc1", "moe_act"]
MODULES = (["expert_fc1"], ["moe_act"], BOTH)
STEPS, MICROBATCHES = 3, 2


class _Idle:
    """A stream or an event."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, *_: Any) -> _Idle:
        return self

    record_event = wait_event = wait_stream = synchronize = record


def _managed(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, torch.nn.Parameter)


@contextlib.contextmanager
def _manager_on_cpu() -> Iterator[list[tuple[Any, ...]]]:
    """Inside, Megatron's manager is a new one that works on a CPU: its own bookkeeping, with
    streams and events that do nothing, tensors of the CPU taken for those of a GPU, and copies in
    pageable memory. Yields what it does, in order: (what, module, ...), with the shape of a tensor
    that is saved or asked for, and the bytes of a group that is copied."""
    log: list[tuple[Any, ...]] = []
    handler = offloading.ChunkOffloadHandler
    pop, offload_tensor = handler.tensor_pop, handler.offload

    def logged(method: str, entry: Callable[..., tuple[Any, ...]]) -> Callable[..., Any]:
        real = getattr(handler, method)

        def call(self: Any, *args: Any) -> Any:
            log.append(entry(self, *args))
            return real(self, *args)

        return call

    def saved(self: Any, tensor: torch.Tensor) -> tuple[Any, ...]:
        name = self.offload_groups[self._offloaded_group_index - 1]._name
        return "saved", name, tuple(tensor.shape)

    def copied(self: Any, group: Any) -> tuple[Any, ...]:
        return "copied", group._name, sum(tensor.nbytes for tensor in group._tensors.values())

    def popped(self: Any, tag: Any) -> torch.Tensor:
        tensor = pop(self, tag)
        log.append(("asked for", self.offload_groups[tag[0] - 1]._name, tuple(tensor.shape)))
        return tensor

    def put(self: Any, tensor: torch.Tensor, use_cpu_pool: bool = True) -> Any:
        return offload_tensor(self, tensor, pin_memory=False, use_cpu_pool=use_cpu_pool)

    methods: dict[str, Any] = {
        "tensor_push": logged("tensor_push", saved), "tensor_pop": popped,
        "bulk_offload_group": logged("bulk_offload_group", copied),
        "on_group_start_forward": logged("on_group_start_forward", lambda _, n: ("started", n)),
        "bulk_offload": logged("bulk_offload", lambda _, n, released: ("committed", n)),
        "offload": put, "_can_manage_tensor_for_offload": staticmethod(_managed),
    }  # fmt: skip
    linears = "megatron.core.extensions.transformer_engine"
    with (
        mock.patch.multiple(torch.cuda, Stream=_Idle, Event=_Idle),
        mock.patch.object(torch.cuda, "current_stream", return_value=_Idle()),
        mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()),
        mock.patch.object(torch.Tensor, "record_stream", create=True),
        mock.patch.multiple(handler, **methods),
        mock.patch(f"{linears}.cpu_offload", mock.Mock(CPUOffloadEnabled=False), create=True),
        mock.patch(f"{linears}.set_save_original_input"),
    ):
        PipelineOffloadManager.reset_instance()
        try:
            yield log
        finally:
            PipelineOffloadManager.OFFLOAD_MGR = None


def _steps(
    modules: Sequence[str], case: str, replay: bool = False, **overrides: Any
) -> dict[str, Any]:
    """Losses and gradients of every step, without an optimizer, and what the manager did in each.
    `modules` are offloaded; `case` is of CASES, or a backend. `replay`: each forward runs as in
    replays of CUDA graphs of attention, where Megatron launches delayed copies in the next layer.
    """
    backend, fields, settings = CASES.get(case, (case, {}, SWIGLU))
    settings = {"moe_grouped_gemm": True, "min_offloaded_tensor_size": 1, **settings, **overrides}
    if modules:
        settings |= {"fine_grained_activation_offloading": True, "offload_modules": modules}
    with _manager_on_cpu() as log, tiny_gpt.plug_in(True, moe_backend=backend, **fields):
        config = tiny_gpt.config_of(**settings)
        model = tiny_gpt.gpt(config, tiny_gpt.grouped_spec(config))
        config.delay_offload_until_cuda_graph = replay
        if replay:
            for block in model.decoder.layers:
                block.register_forward_pre_hook(lambda *_: _flush(log))
        size = tiny_gpt.SEQUENCE
        mask = torch.triu(torch.ones(1, 1, size, size, dtype=torch.bool), 1)
        found: dict[str, Any] = {"losses": [], "gradients": [], "log": []}
        for _ in range(STEPS):
            Offloading.reset()
            log.clear()
            model.zero_grad()
            for microbatch in range(MICROBATCHES):
                tokens, labels, positions = tiny_gpt.batch(0, 0, microbatch)
                if replay:
                    Offloading.enter_replay()
                loss = model(tokens, positions, mask, labels=labels).mean()
                if replay:
                    Offloading.exit_replay()
                loss.backward()
                found["losses"].append(loss.item())
            named = model.named_parameters()
            found["gradients"].append({k: p.grad.clone() for k, p in named if p.grad is not None})
            found["log"].append(list(log))
        layer = model.decoder.layers[0].mlp
        found["ours"] = moe_layer.experts_reason_of(layer)
        found["exchange"] = moe_layer.backend_of(layer)[0]
        found["phases"] = moe_layer.DECISIONS.parts_of(layer).fusion
        manager = PipelineOffloadManager.get_instance()
        found["summary"] = dict(manager.offload_summary_bytes) if modules else {}
        found["parameters"] = len(list(model.parameters()))
        with torch.no_grad():
            log.clear()
            model.eval()(tokens, positions, mask, labels=labels)
            found["evaluated"] = list(log)
    return found


def _flush(log: list[tuple[Any, ...]]) -> None:
    log.append(("flushed",))
    Offloading.flush_delayed_groups()


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["ours"] is None and expected["ours"] is None
    assert found["exchange"] == expected["exchange"]
    assert found["losses"] == expected["losses"]
    for step, plain in zip(found["gradients"], expected["gradients"], strict=True):
        assert len(step) == found["parameters"]
        torch.testing.assert_close(step, plain, rtol=0, atol=0)


def _only(log: list[tuple[Any, ...]], what: str) -> list[tuple[Any, ...]]:
    return [entry[1:] for entry in log if entry[0] == what]


def _runs(rank: int, world: int, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What `_steps` finds with the arguments of each run."""
    tiny_gpt.parallel(expert_model_parallel_size=world)
    return {
        name: tiny_gpt.guarded(functools.partial(_steps, **arguments))
        for name, arguments in runs.items()
    }


def _on_ranks(world: int, runs: dict[str, dict[str, Any]]) -> list[dict[str, dict[str, Any]]]:
    ranks = run_ranks(_runs, world, runs)
    for found in ranks:
        for name, result in found.items():
            assert "error" not in result, f"{name}: {result['error']}"
    return ranks


@pytest.fixture(scope="module")
def every_case() -> dict[str, Any]:
    pairs = itertools.product(CASES, ([], *MODULES))
    (found,) = _on_ranks(1, {f"{c}: {'+'.join(m)}": {"modules": m, "case": c} for c, m in pairs})
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("modules", MODULES, ids="+".join)
def test_offloaded_experts_are_ours_with_the_same_bits_and_each_group_holds_its_tensor(
    every_case: dict[str, Any], case: str, modules: list[str]
) -> None:
    found = every_case[f"{case}: {'+'.join(modules)}"]
    assert found["phases"] is None or case == "phase by phase"
    _same(found, every_case[f"{case}: "])
    # Each group holds its tensor alone and is asked for it once.
    rows = 32 * CASES[case][2].get("moe_router_topk", 2)  # of 32 tokens
    hidden = 48 if "gated_linear_unit" in CASES[case][2] else 96
    shapes = {"expert_fc1": (rows, 32), "moe_act": (rows, hidden)}
    forward = [(name, shapes[name]) for name in modules] * 2  # of two layers
    bytes_of = {name: 4 * rows * columns for name, (rows, columns) in shapes.items()}
    for step, log in enumerate(found["log"]):
        assert _only(log, "saved") == forward * MICROBATCHES
        assert _only(log, "started") == [(name,) for name, _ in forward] * MICROBATCHES
        assert _only(log, "committed") == _only(log, "started")
        assert sorted(_only(log, "asked for")) == sorted(forward * MICROBATCHES)
        # After the first step, which learns the groups, the last of each name stays.
        groups = modules * (1 if step else 2) * MICROBATCHES
        assert _only(log, "copied") == [(name, bytes_of[name]) for name in groups]
    assert found["summary"] == {name: bytes_of[name] for name in modules}
    # A forward without gradients passes the groups and saves nothing.
    assert not {entry[0] for entry in found["evaluated"]} & {"saved", "asked for"}


def test_layers_of_several_ranks_offload_phase_by_phase() -> None:
    runs = {name: {"modules": m, "case": "rounds"} for name, m in (("plain", []), ("both", BOTH))}
    for found in _on_ranks(2, runs):
        plain, offloaded = found["plain"], found["both"]
        assert plain["ours"] is None and offloaded["ours"] is None
        torch.testing.assert_close(offloaded["gradients"], plain["gradients"], rtol=1e-5, atol=1e-7)
        assert plain["exchange"] == offloaded["exchange"] == "rounds"
        assert plain["phases"] is None and offloaded["phases"].startswith("offload_modules=")
        assert offloaded["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        for log in offloaded["log"]:
            names = [name for name, _ in _only(log, "asked for")]
            assert names == ["moe_act", "expert_fc1"] * 2 * MICROBATCHES
            assert _only(log, "copied")


def test_the_managers_settings_hold() -> None:
    settings: dict[str, dict[str, Any]] = {
        "delayed": {"replay": True},
        "fraction": {"activation_offload_fraction": 0.5},
        "large tensors alone": {"min_offloaded_tensor_size": 64 * 96},
    }
    runs = {name: {"modules": BOTH, "case": "local", **more} for name, more in settings.items()}
    (found,) = _on_ranks(1, {"plain": {"modules": [], "case": "local"}, **runs})
    for result in found.values():
        _same(result, found["plain"])
    for log in found["delayed"]["log"]:
        first, second = [n for n, entry in enumerate(log) if entry == ("flushed",)][:2]
        assert _only(log[first:second], "saved") and not _only(log[first:second], "copied")
        names = [name for name, _ in _only(log[second : second + 10], "copied")]
        assert names == BOTH
    # Of the first microbatch one of layer 0's two groups, of the second layer 0's two of four.
    for log in found["fraction"]["log"][1:]:
        names = [name for name, _ in _only(log, "copied")]
        assert names == ["expert_fc1", "expert_fc1", "moe_act"]
    summary = found["large tensors alone"]["summary"]
    assert summary == {"expert_fc1": 0, "moe_act": 64 * 96 * 4}


def test_recomputation_of_what_is_offloaded_is_said_to_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    offload._say_unused.cache_clear()
    config: Any = SimpleNamespace(
        fine_grained_activation_offloading=True,
        offload_modules=["core_attn", "moe_act"],
        delay_offload_until_cuda_graph=False,
    )
    for asked in ("rows", "hidden", "hidden"):
        made = offload.offload_of(config, FluidConfig(moe_recompute=asked))
        assert made is not None and made.parts == ("hidden",)
    (record,) = caplog.records
    assert "--fluid-moe-recompute hidden has no effect on moe_act" in record.message
    config.offload_modules = ["core_attn"]
    assert offload.offload_of(config, FluidConfig()) is None


def test_recomputation_of_rows_that_are_kept_is_said_to_have_no_effect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recompute._say_rows_kept.cache_clear()
    expected = {"both": ("hidden",), "rows": (), "hidden": ("hidden",), "none": ()}
    for asked, parts in expected.items():
        assert recompute_of(FluidConfig(moe_recompute=asked), "over rounds") == parts
        assert len(recompute_of(FluidConfig(moe_recompute=asked), None)) == len(parts) + (
            asked in ("both", "rows")
        )
    both, rows = (record.message for record in caplog.records)
    assert "--fluid-moe-recompute both has no effect on dispatched tokens over rounds" in both
    assert "--fluid-moe-recompute rows has no effect" in rows


def test_a_second_backward_of_one_forward_is_refused_by_name() -> None:
    chunk = SimpleNamespace(on_group_commit_backward=lambda _: None, tensor_pop=lambda tag: tag)
    group = offload._Group(chunk, "moe_act", [torch.ones(1)])
    assert torch.equal(group.take()[0], torch.ones(1))
    with pytest.raises(RuntimeError, match="moe_act is offloaded.*retain_graph"):
        group.take()


def test_what_was_not_fetched_ahead_is_read_when_its_copy_is_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    group = SimpleNamespace(wait_offload_event=lambda stream: done.append("waited"))
    chunk = SimpleNamespace(
        offload_groups=[group],
        on_group_commit_backward=lambda _: done.append("committed"),
        tensor_pop=lambda tag: done.append(tag),
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    offload._Group(chunk, "moe_act", [(1, 0), (1, 1)]).take()
    assert done == ["committed", "waited", (1, 0), (1, 1)]
