"""List the files of the package that run in one steady forward and backward of a patched MoE layer
over NVLink: a token's way, with the functions that run in each.

    python -m tools.token_path

Megatron's layer runs in this process, on a CPU, over simulated symmetric memory of one rank;
Triton's kernels run under its interpreter. The first two steps (decisions, buffers, launches that
are prepared once) are not traced. Left out is `patches/cpu`, which stands in for Megatron's calls
of CUDA.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ("megatron_fluid", "patches")

__all__ = ["files_that_run", "patched_layer", "token_path"]


def files_that_run(step: Callable[[], Any]) -> dict[str, list[str]]:
    """The files of the package of which something runs in `step`, autograd's threads included, as
    paths from the root of the source tree, and the functions that do."""
    codes: set[CodeType] = set()
    monitoring = sys.monitoring
    tool, event = monitoring.PROFILER_ID, monitoring.events.PY_START

    def started(code: CodeType, _: int) -> Any:
        codes.add(code)
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "token path")
    try:
        monitoring.register_callback(tool, event, started)
        monitoring.restart_events()
        monitoring.set_events(tool, event)
        step()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)
    found: dict[str, set[str]] = {}
    for code in codes:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "patches" / "cpu"):
            continue
        name = path.relative_to(ROOT)
        if name.parts[0] in PACKAGE:
            found.setdefault(str(name), set()).add(code.co_qualname)
    return {name: sorted(found[name]) for name in sorted(found)}


@contextlib.contextmanager
def patched_layer(**overrides: Any) -> Iterator[Any]:
    """Megatron's MoELayer on this process' one rank, patched, its path over simulated NVLink.
    overrides: of its TransformerConfig. torch.distributed is initialised."""
    from megatron_fluid.moe import choose
    from megatron_fluid.moe.nvlink import shared
    from megatron_fluid.patches.moe import decision
    from tests.support import tiny_gpt
    from tests.support.simulated_workspace import SimulatedWorkspace

    tiny_gpt.parallel(expert_model_parallel_size=1)

    def workspace(*_: Any) -> Any:
        return SimulatedWorkspace(1).rank(0)

    workspace.close = lambda _: None  # type: ignore[attr-defined]
    with (
        mock.patch.object(shared, "SymmetricWorkspace", workspace),
        mock.patch.object(decision, "nvlink_unsupported_reason", return_value=None),
        mock.patch.dict(choose.TRANSPORTS, nvlink=lambda case: None),
        tiny_gpt.plug_in(True, moe_backend="nvlink"),
    ):
        yield tiny_gpt.moe_layer(tiny_gpt.config_of(**overrides))


def token_path() -> dict[str, list[str]]:
    """The files of one steady forward and backward, and their functions that run."""
    import torch

    with patched_layer() as layer:

        def step() -> None:
            x = torch.randn(8, 1, layer.config.hidden_size, requires_grad=True)
            layer(x)[0].square().sum().backward()

        for _ in range(2):
            step()
        return files_that_run(step)


def main() -> None:
    for name, value in (("TRITON_INTERPRET", "1"), ("MEGATRON_FLUID_CPU", "1")):
        os.environ.setdefault(name, value)
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = token_path()
    for name, functions in found.items():
        print(name, *functions, sep="\n    ")
    print(f"{len(found)} files")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
