"""Megatron's SelfAttention over simulated symmetric memory, a thread a rank, against the same
module on the whole sequence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fluid.attention.layouts import SequenceLayout
from tests.support.launch import run_ranks
from tests.support.machine import NEEDS_INTERPRETER
from tests.support.self_attention_world import (
    HEADS,
    STRADDLING,
    Case,
    angles_of,
    build,
    count_calls,
    error_of,
    start,
    step,
)

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds its groups on gloo")

LAYER_NORM, GATE = ("normalization", "LayerNorm"), ("attention_output_gate", True)
CORE_RECOMPUTE = ("recompute_granularity", "selective"), ("recompute_modules", ["core_attn"])


class _Group:
    """A process group of a thread."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._ranks


def _symmetric(_: int, __: int, ranks: int, cases: list[Case]) -> None:
    """Modules of `ranks` ranks, run by a thread each over simulated symmetric memory, against one
    on the whole sequence."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_fluid.attention.exchange import registry, symmetric
    from megatron_fluid.patches import overlap_decision
    from megatron_fluid.patches.attention import core as core_patch
    from megatron_fluid.patches.attention import overlapped, self_attention
    from megatron_fluid.patches.attention.rotary_tables import rotary_table
    from tests.support.thread_ranks import ThreadBuffers, run_threads

    alone = start(1)
    length = 6 * ranks
    everything, sequence = torch.arange(length), SequenceLayout(length, ranks, "zigzag")
    domains: dict[Any, ThreadBuffers] = {}
    core_patch.nvlink_reason = lambda *_: None
    kind = registry.EXCHANGES["symmetric"]
    registry.EXCHANGES["symmetric"] = dataclasses.replace(
        kind, connect=domains.__getitem__, make=symmetric.SymmetricExchange
    )
    overlap_decision.exchange = lambda mine, group, *_: [mine] * group.size()
    symmetric._COPY_ENGINE_BYTES = 256  # so that there are several head groups
    for case in cases:
        whole = build(case, 1, "auto", alone)
        angles = angles_of(case, length)
        reference = step(whole, case, everything, angles, length)
        if angles is not None:
            table = rotary_table(angles, case.dtype, alone.cp, case.interleaved, True, reader=whole)
            overlapped.rotary_table = lambda *_, reader, table=table: table
        groups = [_Group(rank, ranks) for rank in range(ranks)]
        modules = [
            build(case, ranks, "nvlink", ProcessGroupCollection(tp=alone.tp, cp=group))
            for group in groups
        ]
        assert [self_attention.overlapped(module) for module in modules] == ["nvlink"] * ranks
        for transport in ("sm_push", "copy_engine"):

            def body(
                domain: ThreadBuffers,
                case: Case = case,
                modules: list[Any] = modules,
                groups: list[_Group] = groups,
                angles: Tensor | None = angles,
            ) -> tuple[dict[str, Tensor], int]:
                domains[groups[domain.rank]] = domain
                module = modules[domain.rank]
                module.zero_grad(set_to_none=True)
                path = self_attention.DECISIONS.settle(module).path
                for made in (path._call, path._exchange):
                    made.cache_clear()  # which hold the domain of the mover before
                found = step(module, case, sequence.positions(domain.rank), angles, length)
                return found, module.core_attention.alone.cache_info().currsize if case.te else 0

            count = count_calls()
            results = run_threads(ranks, transport, body)
            assert count() == ranks * case.microbatches
            for name, expected in reference.items():
                for rank, (found, _) in enumerate(results):
                    mine, theirs = found[name], expected
                    if name[:2] in ("y ", "dx"):
                        theirs = expected[sequence.positions(rank)]
                    else:
                        mine = torch.stack([other[name] for other, _ in results]).sum(0)
                    assert error_of(mine, theirs, case.dtype) < 2e-6, (
                        f"{case} {transport} {name} of rank {rank}"
                    )
            if case.te and case.groups == HEADS:
                assert results[0][1] == 2, (
                    "attention of a head group is another module than that of all heads"
                )


SYMMETRIC = [
    Case(norms=True, groups=8, microbatches=2),
    Case(groups=1, interleaved=True, bias=False),
    Case(te=True, groups=8),
    Case(te=True, groups=4, norms=True),
    Case(te=True, groups=1, rotated=0, causal=False),
    Case(te=True, heads=STRADDLING, groups=6),
    # With 8 key/value heads in several head groups, each with its own offsets. (Megatron's local
    # attention with an offset asks for CUDA, to which a CPU answers in the main thread alone.)
    Case(te=True, groups=8, settings=(("softmax_type", "learnable"), LAYER_NORM), norms=True),
    Case(te=True, groups=8, settings=(("softmax_type", "learnable"), GATE)),
    Case(groups=8, settings=(GATE,), norms=True),
    Case(te=True, groups=8, settings=(GATE, *CORE_RECOMPUTE), norms=True, rotated=4),
]


@pytest.mark.slow
@NEEDS_INTERPRETER
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_symmetric_memory_it_is_the_same(ranks: int) -> None:
    run_ranks(_symmetric, 1, ranks, SYMMETRIC, timeout_s=200)
