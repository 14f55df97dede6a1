"""A pytest plug-in that patches Megatron before the conftest of Megatron's own tests imports it.

On a machine without a GPU that includes CPU mode, and the test modules are told that CUDA is
available: nearly all of Megatron's unit tests are skipped otherwise. Torch, Megatron and
megatron_fluid themselves get the true answer. Gloo groups that a test leaves open, each with
threads of its own, are closed after it.

    PYTHONPATH=CHECKOUT/tools torchrun --nproc_per_node 8 -m pytest -p megatron_pytest_plugin
    tests/unit_tests/transformer/moe/test_moe_layer.py

Environment variables:
    MEGATRON_FLUID_PATCHES: "all" (default), or "cpu" for CPU mode alone, which is what a run
        without the plug-in is compared with where there is no GPU. (`MEGATRON_FLUID=off` turns
        everything off.)
"""

import contextlib
import os
import sys

import pytest

from megatron_fluid import patches
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.cpu import mode as cpu
from megatron_fluid.patches.engine.switches import switched_off

__all__ = ["pytest_report_header", "pytest_runtest_teardown"]

_CHOICES = ("all", "cpu")


def _claim_cuda_to_tests() -> None:
    """Make `torch.cuda.is_available()` true for test modules."""
    import torch

    original = torch.cuda.is_available

    def is_available() -> bool:
        asker = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return original() if asker in ("torch", "triton", "megatron", "megatron_fluid") else True

    torch.cuda.is_available = is_available


def _choose() -> str:
    """Apply the choice of patches, before anything of Megatron is imported."""
    choice = os.environ.get("MEGATRON_FLUID_PATCHES", "all").strip().lower()
    if choice not in _CHOICES:
        raise ConfigError.of("MEGATRON_FLUID_PATCHES", choice, " or ".join(_CHOICES))
    os.environ.setdefault("MEGATRON_FLUID_CPU", "1")  # takes effect where no GPU is found
    if cpu.cpu_mode_active() and switched_off() is None:
        _claim_cuda_to_tests()
    if choice == "cpu":
        patches.disable(*(patch.name for patch in patches.PATCHES if patch.group != cpu.GROUP))
    return choice


_CHOICE = _choose()


def pytest_report_header() -> str:
    """Say in one line what is patched."""
    mode = "CPU mode (no GPU found)" if cpu.cpu_mode_active() else "GPU"
    return f"megatron_fluid: patches={_CHOICE}, {mode}"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Close the gloo groups of a test that has taken its parallel state down."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or state.model_parallel_is_initialized() or not cpu.cpu_mode_active():
        return
    import torch.distributed as dist

    if dist.is_initialized():
        world = dist.group.WORLD
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not world:
                with contextlib.suppress(RuntimeError, ValueError):  # a test may have closed it
                    dist.destroy_process_group(group)
