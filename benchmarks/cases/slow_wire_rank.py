"""One rank of the benchmark of slow links: layers, timed at every rate. The suite slow_wire starts
it in a network namespace.

The plain layer is measured first on links without a limit: its time is the computation, and what
its host then sends are the bytes from which rates follow. Every rate measures all variants in turn,
after ours and the plain one without a limit once more: a shared machine's speed changes by a tenth
within a minute, as much as overlap leaves of the wire's time.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.cases.attention import (
    AttentionCase,
    forward_call,
    megatron_attention,
    start_megatron,
    step_call,
)
from benchmarks.cases.slow_wire import (
    CASES,
    Parent,
    WireCase,
    label,
    link_row,
    pin,
    rate_for,
    sent_bytes,
)
from benchmarks.harness.timing import Timing, measure
from benchmarks.harness.variants import runnable
from megatron_fluid import MoEBaseline, MoEConfig, MoELayer, SelfAttention, TransformerLayer
from megatron_fluid.backward.weight_grads import WeightGradScheduler, get_backward_scheduler
from megatron_fluid.comm.p2p_rounds import P2PRounds, PendingRound
from megatron_fluid.config import FluidConfig, set_config

__all__ = ["main"]

_HEAD_DIM, _DEVICE = 64, torch.device("cpu")
_NEVER = WeightGradScheduler()  # not enabled


class BlockingRounds(P2PRounds):
    """Rounds that are waited for where they start: the same exchanges, nothing overlapped."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self.asks_ahead = False

    def start(self, *args: Any, **kwargs: Any) -> PendingRound:
        pending = super().start(*args, **kwargs)
        pending.wait()
        return pending

    def exchange(self, *args: Any, **kwargs: Any) -> PendingRound:
        pending = super().exchange(*args, **kwargs)
        pending.wait()
        return pending


class _Megatron(nn.Module):
    """Megatron's own path of a module that takes and gives [s, 1, H]. Its attention of CPUs has
    none for context parallelism: "collective" puts an all-to-all each way between its projections.
    """

    config = FluidConfig(moe_backend="megatron", cp_backend="collective", tp_overlap="off")

    def __init__(self, build: Callable[[], nn.Module], **arguments: Any) -> None:
        super().__init__()
        set_config(self.config)
        self.module, self.arguments = build(), arguments
        set_config(None)

    def forward(self, x: Tensor) -> Tensor:
        set_config(self.config)  # a layer chooses its path in its first call
        found = self.module(x.unsqueeze(1) if x.dim() == 2 else x, **self.arguments)
        set_config(None)
        y: Tensor = found[0] if isinstance(found, tuple) else found
        return y.view(x.shape)


def _megatron_config(case: WireCase, **settings: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    ranks, moe = case.hosts * case.ranks, case.moe
    shape: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": moe.hidden,
        "num_attention_heads": case.heads,
        "kv_channels": _HEAD_DIM,
        "ffn_hidden_size": moe.ffn,
        "moe_ffn_hidden_size": moe.ffn,
        "num_moe_experts": moe.experts,
        "moe_router_topk": moe.top_k,
        "moe_router_load_balancing_type": "none",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "transformer_impl": "local",
        "expert_model_parallel_size": ranks,
        "expert_tensor_parallel_size": 1,
        "params_dtype": torch.float32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**shape | settings)


def _megatron_moe(case: WireCase, dispatcher: str) -> nn.Module:
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

    config = _megatron_config(case, moe_token_dispatcher_type=dispatcher)
    build = get_moe_module_spec(use_te=False, num_experts=case.moe.experts, moe_grouped_gemm=False)
    layer: Any = build(config)
    layer.set_layer_number(1)
    module: nn.Module = layer
    return module


def _megatron_layer(case: WireCase) -> _Megatron:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    ranks = case.hosts * case.ranks
    length = case.tokens * ranks

    def build() -> nn.Module:
        config = _megatron_config(
            case,
            moe_token_dispatcher_type="alltoall",
            context_parallel_size=ranks,
            cp_comm_type="a2a",
        )
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
        sizes = {"vocab_size": 64, "max_sequence_length": length}
        model: nn.Module = GPTModel(config, spec, **sizes, position_embedding_type="none")
        return model

    made = _Megatron(build, attention_mask=None)
    made.module = made.module.decoder  # type: ignore[assignment]
    return made


def _fluid_moe(case: WireCase, kind: type[MoELayer] | type[MoEBaseline]) -> nn.Module:
    moe = case.moe
    assert dist.group.WORLD is not None
    return kind(MoEConfig(moe.hidden, moe.ffn, moe.experts, moe.top_k), dist.group.WORLD)


def _attention(case: WireCase, **settings: Any) -> nn.Module:
    assert dist.group.WORLD is not None
    return SelfAttention(
        case.moe.hidden, case.heads, head_dim=_HEAD_DIM, group=dist.group.WORLD, **settings
    )


def _layer(case: WireCase, **settings: Any) -> TransformerLayer:
    moe, world = case.moe, dist.group.WORLD
    assert world is not None
    shape = (moe.hidden, case.heads, moe.ffn, moe.experts, moe.top_k)
    fields = {"head_dim": _HEAD_DIM, "rope_theta": None, **settings}
    return TransformerLayer(*shape, ep_group=world, cp_group=world, **fields)


def _without_overlap(case: WireCase) -> nn.Module:
    """Ours, every exchange waited for where it starts."""
    rounds = BlockingRounds(dist.group.WORLD)
    if case.kind == "moe":
        layer = _fluid_moe(case, MoELayer)
        layer.rounds = rounds  # type: ignore[assignment]
        return layer
    if case.kind == "attention":
        attention = _attention(case)
        attention.connection = rounds  # type: ignore[assignment]
        return attention
    whole = _layer(case)
    whole.mlp.rounds = rounds
    whole.self_attention.connection = rounds
    return whole


def _builders(case: WireCase) -> dict[str, Callable[[], nn.Module]]:
    def megatron_attend() -> nn.Module:
        ranks = case.hosts * case.ranks
        shape = AttentionCase(
            case.moe.hidden, case.heads, case.heads, case.tokens * ranks, _HEAD_DIM
        )
        options: dict[str, Any] = {"te": False, "overlap": False, "dtype": torch.float32}
        return megatron_attention(shape, _DEVICE, "collective", **options)

    shared = {"fluid_no_overlap": lambda: _without_overlap(case)}
    if case.kind == "moe":
        return {
            "fluid": lambda: _fluid_moe(case, MoELayer),
            **shared,
            "plain": lambda: _fluid_moe(case, MoEBaseline),
            "megatron_alltoall": lambda: _Megatron(lambda: _megatron_moe(case, "alltoall")),
            "megatron_allgather": lambda: _Megatron(lambda: _megatron_moe(case, "allgather")),
        }
    if case.kind == "attention":
        return {
            "fluid": lambda: _attention(case),
            **shared,
            "plain": lambda: _attention(case, overlap=False, scheduler=_NEVER),
            "megatron_alltoall": megatron_attend,
        }
    return {
        "fluid": lambda: _layer(case),
        **shared,
        "plain": lambda: _layer(case, overlap=False, scheduler=_NEVER),
        "megatron_alltoall": lambda: _megatron_layer(case),
    }


def _bytes_of(call: Callable[[], object]) -> int:
    """What a host sends in one call, of the host that sends most. Collective."""
    dist.barrier()
    before = sent_bytes()
    dist.barrier()
    call()
    dist.barrier()
    found = torch.tensor(sent_bytes() - before)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)


def _measure(
    calls: dict[str, Callable[[], object]], seconds: float, expected_ms: float
) -> dict[str, Timing]:
    iterations = max(5, min(12, int(seconds * 1e3 / expected_ms)))
    return measure(calls, _DEVICE, warmup=1, iters=iterations)


def _sweep(
    name: str, mode: str, ratios: list[float], calls: dict[str, Callable[[], object]],
    parent: Parent, seconds: float,
) -> None:  # fmt: skip
    """Measure all rates of one mode, and hand over the rows of each as it is done."""
    case = CASES[name]
    parent.set_rate(None)
    for call in calls.values():
        call()
    timings = measure(calls, _DEVICE, warmup=1, iters=6)
    bytes_sent = {variant: _bytes_of(call) for variant, call in calls.items()}
    unlimited = {variant: timing.median_ms for variant, timing in timings.items()}
    plain = "plain" if "plain" in unlimited else next(iter(unlimited))
    compared = {plain, "fluid"}
    before: dict[str, float] = {}

    def without_limit() -> dict[str, float]:
        parent.set_rate(None)
        given = {variant: call for variant, call in calls.items() if variant in compared}
        now = measure(given, _DEVICE, warmup=1, iters=6)
        return {variant: timing.median_ms for variant, timing in now.items()}

    for ratio in [0.0, *ratios]:
        rate = None
        if ratio:
            # What the link costs is a difference: of figures of one minute, the one without a limit
            # from before and after it.
            before = before or without_limit()
            rate = rate_for(ratio, before[plain], bytes_sent[plain])
            parent.set_rate(rate)
            expected = sum((unlimited | before).values()) * (1 + ratio)
            timings = _measure(calls, seconds, expected)
            after = without_limit()
            unlimited |= {variant: (before[variant] + ms) / 2 for variant, ms in after.items()}
            before = after
        medians = {variant: timing.median_ms for variant, timing in timings.items()}
        rows = []
        for variant, timing in timings.items():
            row = timing.row(label(name, ratio), mode, variant)
            more: dict[str, Any] = {"rate_bits_per_s": rate, "wire_bytes": bytes_sent[variant]}
            if variant in compared:
                more["unlimited_ms"] = unlimited[variant]
            rows.append(link_row(case, row, ratio, medians, unlimited, **more))
        parent.rows(rows)
        if dist.get_rank() == 0:
            words = "  ".join(f"{v} {ms:.0f}" for v, ms in medians.items())
            hidden = [row.config.get("hidden_share") for row in rows if row.variant == "fluid"]
            share = f"  hidden {hidden[0]:.2f}" if hidden and hidden[0] is not None else ""
            print(f"{label(name, ratio)} {mode} ms: {words}{share}", flush=True)


def main() -> int:
    """Measure one case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True)
    parser.add_argument("--modes", required=True)
    parser.add_argument("--ratios", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--variants", default="")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    case = CASES[options.case]
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    ranks = dist.get_world_size()
    sizes = {"expert_model_parallel_size": ranks, "expert_tensor_parallel_size": 1}
    if case.kind != "moe":
        sizes["context_parallel_size"] = ranks
    if (absent := start_megatron(te=False, **sizes)) and dist.get_rank() == 0:
        print(f"no variants of Megatron: {absent}", file=sys.stderr, flush=True)
    torch.manual_seed(dist.get_rank())
    shape = (case.tokens, case.moe.hidden)
    x = torch.randn(*shape) if case.kind == "moe" else torch.randn(shape[0], 1, shape[1])
    parent = Parent()
    parent.set_rate(None)
    builders = _builders(case)
    if absent:
        builders = {n: b for n, b in builders.items() if not n.startswith("megatron")}
    wanted = set(filter(None, options.variants.split(",")))
    modules = runnable(builders, wanted, x.clone().requires_grad_())
    pin()
    for mode in options.modes.split(","):
        train = mode == "train"
        if train:
            get_backward_scheduler().enable()
        make = step_call if train else forward_call
        for module in modules.values():
            module.train(train)
        calls = {name: make(m, x.clone().requires_grad_(train)) for name, m in modules.items()}
        ratios = [float(ratio) for ratio in options.ratios.split(",")]
        _sweep(options.case, mode, ratios, calls, parent, options.seconds)
        get_backward_scheduler().disable()
    parent.set_rate(None)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
