"""megatron_fluid: communication hidden behind computation in MoE and attention layers.

Importing this package is cheap. Under Megatron it is all that is needed: it arms the patches of
`megatron_fluid.patches`, which take effect when (or if) Megatron's modules are imported.
`MEGATRON_FLUID=off` leaves Megatron untouched, and takes this package's flags from the command
line.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Module -> its public names. They are imported on first use, so that `import megatron_fluid` stays
# cheap.
_MODULES = {
    "megatron_fluid.attention.layer": ("SelfAttention",),
    "megatron_fluid.backward.weight_grads": ("WeightGradScheduler", "get_backward_scheduler"),
    "megatron_fluid.comm.failed_waits": ("check_for_failed_waits",),
    "megatron_fluid.comm.groups": ("close_group",),
    "megatron_fluid.comm.p2p_rounds": ("MultiCardOverlapContext", "P2PRounds"),
    "megatron_fluid.config": ("FluidConfig", "current_config", "set_config"),
    "megatron_fluid.errors": ("ConfigError", "FluidError", "PatchError", "PeerTimeoutError"),
    "megatron_fluid.low_latency.all_to_all": ("AllToAll",),
    "megatron_fluid.moe.config": ("MoEConfig", "MoEConfigDict"),
    "megatron_fluid.moe.layer": ("MoEBaseline", "MoELayer", "moe_multicard_p2p_overlap_forward"),
    "megatron_fluid.moe.room": ("graph_room",),
    "megatron_fluid.patches.arguments": ("configure",),
    "megatron_fluid.moe.sharding": ("clip_grad_norm_",),
    "megatron_fluid.patches.layer_specs": ("get_fluid_custom_layers",),
    "megatron_fluid.tensor_parallel.ops": ("all_gather_matmul", "matmul_reduce_scatter"),
    "megatron_fluid.transformer_layer": ("TransformerLayer",),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:  # the same, for type checkers and editors
    from megatron_fluid.attention.layer import SelfAttention as SelfAttention
    from megatron_fluid.backward.weight_grads import WeightGradScheduler as WeightGradScheduler
    from megatron_fluid.backward.weight_grads import (
        get_backward_scheduler as get_backward_scheduler,
    )
    from megatron_fluid.comm.failed_waits import check_for_failed_waits as check_for_failed_waits
    from megatron_fluid.comm.groups import close_group as close_group
    from megatron_fluid.comm.p2p_rounds import MultiCardOverlapContext as MultiCardOverlapContext
    from megatron_fluid.comm.p2p_rounds import P2PRounds as P2PRounds
    from megatron_fluid.config import FluidConfig as FluidConfig
    from megatron_fluid.config import current_config as current_config
    from megatron_fluid.config import set_config as set_config
    from megatron_fluid.errors import ConfigError as ConfigError
    from megatron_fluid.errors import FluidError as FluidError
    from megatron_fluid.errors import PatchError as PatchError
    from megatron_fluid.errors import PeerTimeoutError as PeerTimeoutError
    from megatron_fluid.low_latency.all_to_all import AllToAll as AllToAll
    from megatron_fluid.moe.config import MoEConfig as MoEConfig
    from megatron_fluid.moe.config import MoEConfigDict as MoEConfigDict
    from megatron_fluid.moe.layer import MoEBaseline as MoEBaseline
    from megatron_fluid.moe.layer import MoELayer as MoELayer
    from megatron_fluid.moe.layer import (
        moe_multicard_p2p_overlap_forward as moe_multicard_p2p_overlap_forward,
    )
    from megatron_fluid.moe.room import graph_room as graph_room
    from megatron_fluid.moe.sharding import clip_grad_norm_ as clip_grad_norm_
    from megatron_fluid.patches.arguments import configure as configure
    from megatron_fluid.patches.layer_specs import (
        get_fluid_custom_layers as get_fluid_custom_layers,
    )
    from megatron_fluid.tensor_parallel.ops import all_gather_matmul as all_gather_matmul
    from megatron_fluid.tensor_parallel.ops import matmul_reduce_scatter as matmul_reduce_scatter
    from megatron_fluid.transformer_layer import TransformerLayer as TransformerLayer


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name, obj=sys.modules[__name__])
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _refuse_second_copy() -> None:
    """Two copies in one process (a wheel and a source tree, say) would patch Megatron twice."""
    first = getattr(sys, "_megatron_fluid", None)
    if first is not None and first is not globals():
        raise ImportError(
            f"megatron_fluid is loaded already, from {first['__file__']}; this copy is {__file__}. "
            "Keep one of them on sys.path"
        )


def _load_patches_of_source_tree() -> None:
    """In a source tree (used by PYTHONPATH, or installed with `pip install -e .`)
    `megatron_fluid.patches` lies beside this folder, where the import system does not look. In an
    installed package it lies inside, and there is nothing to do.
    """
    if "megatron_fluid.patches" in sys.modules:
        return  # this module is reloaded: a second engine would patch what is patched
    here = Path(__file__).resolve().parent
    folder = here.parent / "patches"
    if importlib.machinery.PathFinder.find_spec("megatron_fluid.patches", __path__) is not None:
        return  # also in a wheel that is imported zipped
    spec = importlib.util.spec_from_file_location(
        "megatron_fluid.patches", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None or not (folder / "__init__.py").is_file():
        raise ImportError(f"megatron_fluid.patches is neither in {here} nor at {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules["megatron_fluid.patches"] = module
    spec.loader.exec_module(module)
    globals()["patches"] = module


def _leave_flags_out() -> None:
    """Under MEGATRON_FLUID=off take this package's flags from the command line: Megatron, whose
    parser is not patched then, would end with an error. Commands of this package read their own."""
    begins = ("--fluid-", "--no-fluid-")
    given = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith(begins)]
    switches = importlib.import_module("megatron_fluid.patches.engine.switches")
    if not given or (why := switches.switched_off()) is None or _is_command():
        return
    arguments = importlib.import_module("megatron_fluid.patches.arguments")
    kept = arguments.without_flags(sys.argv[1:])
    if kept != sys.argv[1:] and os.environ.get("RANK", "0") == "0":
        print(f"megatron_fluid: {why} leaves out {' '.join(given)}", file=sys.stderr)
    sys.argv[1:] = kept


def _is_command() -> bool:
    return Path(sys.argv[0]).name.startswith("megatron-fluid") or (
        "megatron_fluid.cli" in sys.orig_argv
    )


def _arm() -> None:
    """Arm the patches of Megatron. A variable that cannot be read ends a command and a job's ranks
    with one line a host, and so does a broken requirement of the command line; in any other process
    it is the error itself."""
    errors = importlib.import_module("megatron_fluid.errors")
    try:
        importlib.import_module("megatron_fluid.patches").arm()
        _leave_flags_out()
    except (errors.ConfigError, ImportError) as error:
        ours = _is_command()
        command, rank = ours or sys.argv[0] == "-m", "RANK" in os.environ
        if not (ours if isinstance(error, ImportError) else command or rank):
            raise
        if ours or not rank or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"megatron_fluid: {error}", file=sys.stderr)
        raise SystemExit(2) from None


_refuse_second_copy()
_load_patches_of_source_tree()
_arm()
sys._megatron_fluid = globals()  # type: ignore[attr-defined]
