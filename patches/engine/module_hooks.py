"""What calling a module would do besides its arithmetic: its hooks, and a forward of its own, for
overlapped paths that bypass it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as every

__all__ = ["ModuleHooks"]

# Whose hooks Megatron's train_step puts on for single iterations, on all ranks alike
# (--save-activations-interval and its like).
_LOGGERS = ("megatron.training.activation_logging", "megatron.training.dgrad_logging")

# Registration fills these in place, too.
_GLOBAL = (
    every._global_forward_pre_hooks,
    every._global_forward_hooks,
    every._global_backward_hooks,
    every._global_backward_pre_hooks,
)


class ModuleHooks:
    """The hooks that calling modules would have run.

    Megatron's DDP puts a forward pre-hook on every module when it gathers parameters during the
    forward: that one only waits for the module's parameters, and is run here. Any other hook sees
    inputs and outputs that the overlapped path never makes. Those with which Megatron saves what
    passes a module come and go with an iteration: such a call is Megatron's own.

    Args:
        roots: modules by name, with all that they hold.
    """

    def __init__(self, **roots: torch.nn.Module) -> None:
        self._modules = [
            named for name, root in roots.items() for named in root.named_modules(prefix=name)
        ]
        # Registration fills these dictionaries in place, so looking at them is all a call has to
        # do.
        self._pre = [(name, module, module._forward_pre_hooks) for name, module in self._modules]
        self._other = [
            (name, hooks)
            for name, module in self._modules
            for hooks in (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
        ]
        self._other += [("every module (torch's global hooks)", hooks) for hooks in _GLOBAL]
        # Classes and children as they are now.
        self._kinds = [
            (name, module, type(module), dict(module._modules)) for name, module in self._modules
        ]
        self._all = [hooks for *_, hooks in (*self._pre, *self._other)]

    def registered(self) -> bool:
        """Whether there is any hook: of local experts some hundred dictionaries, in every call."""
        return any(self._all)

    def foreign(self) -> str | None:
        """Name the first module with a hook that cannot be honoured, or None; those that ``logged``
        reports do not count."""
        if not self.registered():
            return None
        for name, hooks in self._other:
            if hooks and not all(_is_logger(hook) for hook in hooks.values()):
                return f"a hook is registered on {name}"
        for name, _, hooks in self._pre:
            if hooks and not all(_is_parameter_gather(hook) for hook in hooks.values()):
                return f"a forward pre-hook is registered on {name}"
        return None

    def logged(self) -> str | None:
        """Say what Megatron saves in this iteration, on all ranks alike, and name the first module;
        or None."""
        if not self.registered():
            return None
        for name, hooks in self._other:
            if any(_is_logger(hook) for hook in hooks.values()):
                return f"Megatron saves activations or their gradients ({name}'s first)"
        return None

    def replaced(self) -> str | None:
        """Name the first module that has another forward on the instance, or since this object was
        made another class or other children; or None."""
        for name, module, kind, children in self._kinds:
            if "forward" in module.__dict__:
                return f"{name}.forward was replaced on the instance"
            if type(module) is not kind:
                return f"{name} became a {type(module).__name__}"
            if module._modules != children:
                return f"a module of {name} was replaced"
        return None

    def run_parameter_gather(self) -> None:
        """Wait until the modules' parameters are gathered (DDP with overlap_param_gather)."""
        if self.registered():
            for _, module, hooks in self._pre:
                for hook in list(hooks.values()):
                    hook(module, ())


def _is_logger(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", None) in _LOGGERS


def _is_parameter_gather(hook: Callable[..., Any]) -> bool:
    qualified = getattr(hook, "__qualname__", "")
    return getattr(
        hook, "__module__", None
    ) == "megatron.core.distributed.distributed_data_parallel" and (
        qualified.startswith("DistributedDataParallel._make_forward_pre_hook")
    )
