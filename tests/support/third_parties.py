"""What takes long in an import of Megatron-Core and is not its own; see fresh_program.py."""

import contextlib
import importlib

_THIRD_PARTIES = (
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "torch.export",
    "triton.language",
    "wrapt",
)
for _name in _THIRD_PARTIES:
    with contextlib.suppress(ImportError):  # whoever needs it says so
        importlib.import_module(_name)
