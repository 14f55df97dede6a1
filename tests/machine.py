"""What this machine really has. CPU mode, once a test imports Megatron, tells everybody in the process of one device.

tests/conftest.py imports this before any test module; tests ask here, never `torch.cuda.device_count()`.
"""

from __future__ import annotations

import torch

__all__ = ["GPUS"]

GPUS = torch.cuda.device_count()
