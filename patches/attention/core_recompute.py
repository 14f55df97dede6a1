"""Megatron's recomputation of the core attention by itself (`recompute_modules core_attn`), in the
overlapped forward: a backward computes it again from queries, keys and values, with the random
numbers of the first time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, noop_context_fn

__all__ = ["recomputed", "recomputes_here"]


def recomputes_here() -> bool:
    """Whether a kernel's graph may be recomputed by itself: not without gradients, and not under
    saved-tensor hooks (of a checkpoint around the layer), which keep its inputs elsewhere."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return torch.is_grad_enabled() and hooks is None


def recomputed(attend: Callable[..., Tensor], draws: bool, *args: Any) -> Tensor:
    """attend(*args), of which backward keeps the arguments alone.

    ``draws``: whether it draws random numbers.
    """
    # Megatron's own checkpoint runs a backward of autograd, where this one is asked for gradients.
    result: Tensor = checkpoint(
        attend,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,  # of Megatron's generators, too: by the contexts
        determinism_check="none",
        context_fn=_contexts if draws else noop_context_fn,
    )
    return result


def _contexts() -> tuple[Any, Any]:
    """Contexts of the forward, which begins now, and of the recomputation."""
    from megatron.core.tensor_parallel.random import _get_all_rng_states

    return contextlib.nullcontext(), _restored(_get_all_rng_states())


@contextlib.contextmanager
def _restored(states: Any) -> Iterator[None]:
    from megatron.core.tensor_parallel.random import _fork_rng, _set_all_rng_states

    with _fork_rng():
        _set_all_rng_states(*states)
        yield
