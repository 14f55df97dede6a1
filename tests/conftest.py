"""Loaded before every test module: the machine is looked at before any of them changes what torch
says of it.

Kernels run under Triton's interpreter where there is no GPU. Triton decides it when it is imported
itself, and any test module may import it, so it is chosen here and nowhere below.
"""

from __future__ import annotations

import os

from tests.support.machine import GPUS

__all__ = ["GPUS"]

if not GPUS:
    os.environ.setdefault("TRITON_INTERPRET", "1")
