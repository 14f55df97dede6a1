"""Hooks on modules that overlapped paths bypass, and whether their class, forward or children are
still Megatron's. Calling the modules would have run these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as every

from megatron_fluid.backward.autograd import gradient_owner

__all__ = ["ModuleHooks", "is_foreign", "replaced_forward"]

# Modules whose hooks Megatron's train_step registers for single iterations, on all ranks alike
# (such as --save-activations-interval).
_LOGGERS = ("megatron.training.activation_logging", "megatron.training.dgrad_logging")
# Modules whose forward hooks note, while a layer is captured, which of Transformer Engine's modules
# are called, for their fp8 state and delayed weight gradients. A bypassed module has neither.
_OBSERVERS = ("transformer_engine.pytorch.graph",)

# Registration fills these in place.
_GLOBAL = (
    every._global_forward_pre_hooks,
    every._global_forward_hooks,
    every._global_backward_hooks,
    every._global_backward_pre_hooks,
)

# Where the forwards that are bypassed are written; "contextlib": decorators such as no_grad.
_OWN = ("megatron.core", "megatron_fluid", "torch", "transformer_engine", "contextlib")


class ModuleHooks:
    """The hooks, classes, forwards and children of modules.

    If Megatron's DDP gathers parameters during the forward, it registers a forward pre-hook on
    every module that waits for its parameters: `run_parameter_gather` runs it. Any other hook would
    see inputs and outputs that the overlapped path never makes (`foreign`). Hooks with which
    Megatron saves activations exist during single iterations, which are Megatron's own (`logged`).
    Hooks with which Transformer Engine captures a layer read no values and change nothing.

    Args:
        roots: modules by name, with all that they hold.

    Attributes:
        modules: all of them.
        registered: the dictionaries of their hooks and torch's global ones, which registration
            fills in place: `any(registered)` says whether there is a hook.
        was_logged: the last answer of `logged`.
    """

    def __init__(self, **roots: torch.nn.Module) -> None:
        self._named = [
            named for name, root in roots.items() for named in root.named_modules(prefix=name)
        ]
        self.modules = [module for _, module in self._named]
        self._pre = [(name, module._forward_pre_hooks) for name, module in self._named]
        self._other = [
            (name, hooks)
            for name, module in self._named
            for hooks in (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
        ]
        self._other += [("every module (torch's global hooks)", hooks) for hooks in _GLOBAL]
        self.registered = [hooks for _, hooks in (*self._pre, *self._other)]
        # Classes, forwards and children as they are now. A class whose modules have no children
        # calls none, even if a child is added later.
        self._kinds = [
            (name, module, type(module), dict(module._modules)) for name, module in self._named
        ]
        classes: list[Any] = [*map(type, self.modules)]
        self._forwards = {kind: kind.forward for kind in classes}
        self.was_logged = False
        self._owner: object = None  # of the modules' gradients, with its bucket groups
        self._groups: tuple[Any, ...] = ()

    def foreign(self) -> str | None:
        """Name the first module with a hook that cannot be honoured, or None. Ignores hooks that
        `logged` reports."""
        if not any(self.registered):
            return None
        for name, hooks in self._other:
            if hooks and not all(_is_logger(h) or _is_observer(h) for h in hooks.values()):
                return f"a hook is registered on {name}"
        for name, hooks in self._pre:
            if hooks and not all(_is_parameter_gather(h) for h in hooks.values()):
                return f"a forward pre-hook is registered on {name}"
        return None

    def logged(self) -> str | None:
        """Say that Megatron saves activations or gradients in this iteration, and name the first
        module; or None. All ranks agree.

        To be asked in every forward with hooks, and in the next one without. Where the answer
        changes, so does the path of the layer, and with selective recomputation the number of
        backward passes that reach its parameters: the owners of their gradients count them again.
        """
        if not (self.was_logged or any(self.registered)):
            return None
        names = (n for n, hooks in self._other if any(map(_is_logger, hooks.values())))
        first = next(names, None)
        if self.was_logged is not (first is not None):
            self.was_logged = first is not None
            owners = (
                gradient_owner(p) for module in self.modules for p in module.parameters(False)
            )
            for owner in {id(owner): owner for owner in owners if owner is not None}.values():
                owner.count_again()
        return first and f"Megatron saves activations or their gradients ({first}'s first)"

    def replaced(self) -> str | None:
        """Name the first module with a forward on the instance, or whose class, children or class's
        forward changed since this object was made; or None."""
        for name, module, kind, children in self._kinds:
            if "forward" in module.__dict__:
                return f"{name}.forward was replaced on the instance"
            if type(module) is not kind:
                return f"{name} became a {type(module).__name__}"
            if children and module._modules != children:
                return f"a module of {name} was replaced"
        for kind, forward in self._forwards.items():
            if kind.forward is not forward:
                return f"{kind.__name__}.forward was replaced on the class"
        return None

    def overridden(self) -> str | None:
        """Name the first class whose forward is not its own, or None."""
        return next(filter(None, map(replaced_forward, self._forwards)), None)

    def run_parameter_gather(self) -> None:
        """Wait for the modules' parameters to be gathered (DDP with overlap_param_gather).

        Megatron's hooks ask for each parameter in every microbatch, here about a hundred. They are
        not run if the few bucket groups of the parameters say that all are gathered.
        """
        if not any(self.registered) or self._gathered():
            return
        for module in self.modules:
            for hook in list(module._forward_pre_hooks.values()):
                hook(module, ())

    def _gathered(self) -> bool:
        """Whether Megatron's gather hooks would do nothing. False if that is not known."""
        params = (p for m in self.modules for p in m._parameters.values() if p is not None)
        first = next(params, None)
        owner = None if first is None else gradient_owner(first)
        if owner is not self._owner:
            self._owner = owner
            groups = getattr(owner, "bucket_groups", None)  # of Megatron's DistributedDataParallel
            self._groups = () if groups is None else groups([first, *params])
        return bool(self._groups) and all(
            group.param_gather_dispatched and group.param_gather_handle is None
            for group in self._groups
        )


def replaced_forward(kind: type[torch.nn.Module]) -> str | None:
    """Say that a class of Megatron or torch has a forward from elsewhere, or None."""
    if not _is_own_name(kind.__module__) or not is_foreign(kind.forward):
        return None
    return f"{kind.__name__}.forward was replaced on the class"


def is_foreign(function: Any) -> bool:
    """Whether a function, or one that it wraps (functools.wraps), is written outside Megatron-Core,
    torch, Transformer Engine and this package."""
    while function is not None:
        written_in = getattr(function, "__globals__", {}).get("__name__")
        # torch.compile leaves a function of torch's, with the name of the module that it compiled.
        for module in (written_in, getattr(function, "__module__", None)):
            if module is not None and not _is_own_name(module):
                return True
        function = getattr(function, "__wrapped__", None)
    return False


def _is_own_name(module: str) -> bool:
    return any(module == own or module.startswith(f"{own}.") for own in _OWN)


def _is_logger(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", None) in _LOGGERS


def _is_observer(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", None) in _OBSERVERS


def _is_parameter_gather(hook: Callable[..., Any]) -> bool:
    qualified = getattr(hook, "__qualname__", "")
    return getattr(
        hook, "__module__", None
    ) == "megatron.core.distributed.distributed_data_parallel" and (
        qualified.startswith("DistributedDataParallel._make_forward_pre_hook")
    )
