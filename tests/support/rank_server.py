"""What is imported before the first rank is forked; see tests/support/templates.py.

Third parties only. A rank imports megatron_fluid itself, under the environment of its own test.
"""

import contextlib
import importlib
import importlib.util
import os
import sys

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
# With a GPU, Megatron's imports may create a CUDA context, which a fork must not inherit: ranks
# import it themselves.
if not os.path.exists("/dev/nvidiactl") and importlib.util.find_spec("megatron") is not None:
    _ALWAYS += _MEGATRON
for _name in _ALWAYS:
    with contextlib.suppress(ImportError):  # the rank that needs it says so
        importlib.import_module(_name)
if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
    importlib.import_module("tests.support.interpreter").quicken()
