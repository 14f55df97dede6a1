"""What of a layer's forward its backward computes again, as --fluid-moe-recompute asks."""

from __future__ import annotations

import functools
import logging

from megatron_fluid.config import FluidConfig, moe_recompute

__all__ = ["recompute_of"]

_LOGGER = logging.getLogger("megatron_fluid")


def recompute_of(config: FluidConfig, rows_kept: str | None) -> tuple[str, ...]:
    """Which of "rows" and "hidden" a layer's backward computes again. rows_kept: where rows are
    kept whatever config asks for, as "over rounds"; None where they are not."""
    parts = moe_recompute(config)
    if rows_kept is None or "rows" not in parts:
        return parts
    _say_rows_kept(config.moe_recompute, rows_kept)
    return tuple(part for part in parts if part != "rows")


@functools.cache
def _say_rows_kept(recompute: str, where: str) -> None:
    _LOGGER.warning(
        f"megatron_fluid: --fluid-moe-recompute {recompute} has no effect on dispatched tokens "
        f"{where}: they are kept. `hidden` computes the output of fc1 again there, too"
    )
