"""What this machine really has. CPU mode, once a test imports Megatron, tells everybody in the process of one device.

tests/conftest.py imports this before any test module; tests ask here, never `torch.cuda.device_count()`.
"""

from __future__ import annotations

import os

import pytest
import torch

__all__ = ["GPUS", "INTERPRETED", "NEEDS_INTERPRETER"]

GPUS = torch.cuda.device_count()

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0" if GPUS else "1") == "1"
"""Whether kernels run under Triton's interpreter, which alone takes tensors of a CPU; see tests/conftest.py."""

NEEDS_INTERPRETER = pytest.mark.skipif(
    not INTERPRETED, reason="runs kernels on tensors of a CPU, which takes Triton's interpreter: TRITON_INTERPRET=1"
)
