"""What this machine really has: CPU mode, once a test imports Megatron, tells everybody in the
process of one device. tests/conftest.py imports this before any test module; tests ask here,
never `torch.cuda.device_count()`."""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

GPUS = torch.cuda.device_count()

RANKS = int(os.environ.get("MEGATRON_FLUID_TEST_RANKS", GPUS)) if GPUS else 0
"""Ranks of the tests that run on GPUs. Four on two GPUs show what only four ranks can do wrong: see
`SHARED`."""

SHARED = RANKS > GPUS > 0
"""Whether ranks share GPUs. Kernels then take turns, so nothing is fast, and the collectives are
gloo's: NCCL refuses."""

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0" if GPUS else "1") == "1"
"""Whether kernels run under Triton's interpreter, which alone takes tensors of a CPU; see
tests/conftest.py."""

NEEDS_INTERPRETER = pytest.mark.skipif(
    not INTERPRETED,
    reason="runs kernels on tensors of a CPU, which takes Triton's interpreter: TRITON_INTERPRET=1",
)


@contextlib.contextmanager
def sms_in_use(count: int | None) -> Iterator[None]:
    """The kernels for Hopper are started on so many SMs, None for all."""
    if count is None:
        yield
        return
    sms = "megatron_fluid.kernels.sm90.launch.multiprocessors"
    with mock.patch(sms, return_value=count):
        yield
