"""What the server of ranks imports before it forks the first of them; see tests/support/launch.py.

Third parties only. A rank imports megatron_fluid itself, under the environment of its own test.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import sys

__all__ = ["PATH_ADDED"]

PATH_ADDED = "MEGATRON_FLUID_TEST_SERVER_PATH"
"""The environment variable that holds what launch.py put in front of the server's PYTHONPATH."""

_ALWAYS = (
    "torch",
    "torch.distributed",
    "torch.distributed.nn",
    "torch.distributed._symmetric_memory",
    "torch._dynamo",
    "hypothesis",
    "pytest",
    "triton",
    "triton.language",
    "wrapt",
)
_MEGATRON = (
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel",
    "megatron.core.tokenizers.text",  # which imports transformers: half of a short training's time
    "megatron.training",
    "megatron.training.training",
)


def _restore_path() -> None:
    added = os.environ.pop(PATH_ADDED, None)
    if added is not None:
        rest = os.environ.get("PYTHONPATH", "").removeprefix(added).removeprefix(os.pathsep)
        if rest:
            os.environ["PYTHONPATH"] = rest
        else:
            os.environ.pop("PYTHONPATH", None)


def _preload() -> None:
    names = list(_ALWAYS)
    # With a GPU, Megatron's imports may create a CUDA context, which a fork must not inherit: ranks
    # import it themselves.
    if not os.path.exists("/dev/nvidiactl") and importlib.util.find_spec("megatron") is not None:
        names += _MEGATRON
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # the rank that needs it says so
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        importlib.import_module("tests.support.interpreter").quicken()
    # Nothing that is alive now is looked at again by a rank's collector, nor by code that walks
    # gc.get_objects(): each look would copy the pages that the ranks share.
    gc.collect()
    gc.freeze()


_restore_path()
_preload()
