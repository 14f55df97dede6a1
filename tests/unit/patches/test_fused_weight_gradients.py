"""Gradient accumulation fusion of Megatron's linears where Apex is not installed: accepted, exact,
left to Apex where that is, and refused again once the patches are reverted."""

import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.pipeline_parallel import schedules

from megatron_fluid import patches
from megatron_fluid.config import FluidConfig, set_config
from tests.support import tiny_gpt
from tests.support.fresh_program import run_code
from tests.support.fused_linear import fused_linear, main_grad_errors
from tests.support.launch import on_ranks

APEX = "fused_weight_gradient_mlp_cuda"
NAMES = ("weight-gradient-kernel", "gradient-accumulation-fusion", "deferred-embedding-gradients")
S, B, H, OUT = 8, 2, 6, 10  # the whole sequence, batch, hidden, outputs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(APEX) is not None, reason="Apex is installed, so nothing is patched"
)


def _refusal() -> str:
    try:
        fused_linear("column", torch.float32, H, OUT)
    except RuntimeError as error:
        return str(error)
    return ""


@on_ranks(2)
def test_the_linears_gradients_are_those_of_float64(rank: int, ranks: int) -> None:
    logging.getLogger("megatron").setLevel(logging.ERROR)
    tiny_gpt.parallel(tensor_model_parallel_size=ranks)
    set_config(FluidConfig(tp_overlap="off"))
    errors = main_grad_errors(S, B, H, OUT)
    assert len(errors) == 12
    for case, error in errors.items():
        # What is added to fp32 was not rounded to the model's bf16 before.
        assert error < (2**-7 if "into torch.bfloat16" in case else 1e-6), case
        assert error == 0 or not case.endswith(", 0"), case


@on_ranks(1)
def test_megatron_refuses_it_again_once_a_patch_is_reverted(rank: int, ranks: int) -> None:
    """The flag alone would let a model be built whose backward finds nothing to call."""
    tiny_gpt.parallel()
    assert _refusal() == ""
    patches.revert(*NAMES)
    assert APEX in _refusal()
    for name in NAMES[:2]:
        with patches.patched(*(other for other in NAMES if other != name)):
            assert APEX in _refusal(), name


@on_ranks(1)
def test_deferred_gradients_of_the_output_layer_find_the_kernel_and_nobody_else_does(
    rank: int, ranks: int
) -> None:
    weight = torch.nn.Parameter(torch.zeros(OUT, H, dtype=torch.bfloat16))
    weight.main_grad = torch.zeros(OUT, H)  # type: ignore[attr-defined]
    config = SimpleNamespace(gradient_accumulation_fusion=True, sequence_parallel=False)
    torch.manual_seed(1)
    inputs = [torch.randn(S, B, H).bfloat16().requires_grad_() for _ in range(3)]
    upstream = [torch.randn(S, B, OUT).bfloat16() for _ in range(3)]
    expected = sum(
        torch.einsum("sbo,sbh->oh", dy.double(), x.double())
        for dy, x in zip(upstream, inputs, strict=True)
    )
    schedules.drain_embedding_wgrad_compute(
        config, [*inputs], [*upstream], weight, dist.group.WORLD
    )
    torch.testing.assert_close(weight.main_grad.double(), expected, rtol=0, atol=1e-4)  # type: ignore[union-attr]
    assert not weight.main_grad.requires_grad and APEX not in sys.modules  # type: ignore[union-attr]
    patches.revert(*NAMES)
    with pytest.raises(ImportError, match=APEX):
        utils.drain_embedding_wgrad_compute(config, inputs, upstream, weight, dist.group.WORLD)


WITH_APEX = f"""
import megatron_fluid
from megatron.core import utils
from megatron.core.tensor_parallel import layers
import {APEX}
assert layers.{APEX} is {APEX} and layers._grad_accum_fusion_available is True
assert not hasattr(utils.drain_embedding_wgrad_compute, "__wrapped__")
rows = {{row.patch: row for row in megatron_fluid.patches.report()}}
for name in {NAMES}:
    print(name, rows[name].state, rows[name].reason, sep="; ")
"""


def test_apexs_own_extension_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / f"{APEX}.py").touch()
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{WITH_APEX}"
    run = run_code(code, environment={**os.environ, "PYTHONPATH": path})
    assert run.returncode == 0, run.stderr
    words = f"not needed; only where Apex's {APEX} cannot be imported"
    assert run.stdout.splitlines() == [f"{name}; {words}" for name in NAMES]
