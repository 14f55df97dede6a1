"""The first forward over symmetric memory waits for no import that could have begun earlier."""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.distributed as dist

from megatron_fluid.comm.symmetric import import_ahead
from tests.support.launch import run_ranks

_PROGRAM = """
import sys
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from megatron_fluid.comm import symmetric
from megatron_fluid.moe import layer

assert "sympy" not in sys.modules, "the package itself imports it"
symmetric.import_ahead(torch.device("cuda")).join()
before = set(sys.modules)
symmetric_memory._use_implicit_mempool = False
symmetric_memory._SymmetricMemory = type("Memory", (), {"empty_strided_p2p": lambda *given: given})
size, *_ = symmetric_memory.empty(256, dtype=torch.uint8, device="cuda")
assert size == (256,)
print(sorted(name for name in set(sys.modules) - before if not name.startswith("torch.")))
"""


def test_what_torch_imports_at_its_first_allocation_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def _begun(rank: int, world: int) -> list[str]:
    from megatron_fluid.moe import layer

    begun: list[str] = []
    layer.import_ahead = lambda device: begun.append(device.type)  # type: ignore[assignment]
    config = {"hidden_size": 8, "ffn_hidden_size": 8, "num_experts": 4, "top_k": 2}
    layer.MoELayer(config, dist.group.WORLD)
    return begun


def test_a_layer_of_several_ranks_begins_it_when_it_is_built() -> None:
    assert run_ranks(_begun, 2) == [["cpu"]] * 2
    assert run_ranks(_begun, 1) == [[]]
    assert import_ahead(torch.device("cpu")) is None
