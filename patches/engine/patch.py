"""Patches as data: a change to Megatron, and a line of the report about it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "APPLIED",
    "ARMED",
    "MEGATRON",
    "MISFIT",
    "NOT_NEEDED",
    "OFF",
    "REVERTED",
    "Patch",
    "Row",
]

ARMED, APPLIED, OFF, NOT_NEEDED, REVERTED = "armed", "applied", "off", "not needed", "reverted"
MISFIT = "misfit"  # Megatron's target is not what the patch was written for

MEGATRON = "Megatron"  # group of the patches outside CPU mode


@dataclass(frozen=True)
class Patch:
    """One change to Megatron (or, in CPU mode, to torch).

    Attributes:
        name: what users call it, in reports and in `--fluid-disable-patch`.
        target: "package.module:attribute" or "package.module:Class.method".
        replacement: "package.module:factory", or the factory itself; `factory(original)` returns
            the new object. The module is imported when the patch is applied. A staticmethod or
            classmethod is unwrapped for the factory and wrapped again.
        reason: why this is a patch and no layer spec or setting; one sentence, shown to users.
        signature: the signature it was written for, as after `def name`: "(self, x, *,
            group=None)". Names, kinds and the presence of defaults must agree, but optional
            parameters may be missing (signatures.fits). None: not checked, for a flag or a
            replacement that passes all arguments on.
        requires: names of patches without which this one is not applied.
        trigger: the module after whose import it is applied. Default: the module of its target.
        when: called at that moment; returns whether the patch is needed.
        condition: what `when` checks, in words, for the report.
        group: heading in the report.
        adds: the target may be missing: the factory then gets None, and reverting deletes the
            attribute.
    """

    name: str
    target: str
    replacement: str | Callable[[Any], Any]
    reason: str
    signature: str | None = None
    trigger: str | None = None
    when: Callable[[], bool] | None = None
    condition: str = ""
    group: str = MEGATRON
    adds: bool = False
    requires: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The module that holds the target."""
        return self.target.partition(":")[0]

    @property
    def factory(self) -> Callable[[Any], Any]:
        """The replacement's factory; imports its module."""
        if not isinstance(self.replacement, str):
            return self.replacement
        module, _, attribute = self.replacement.partition(":")
        factory: Callable[[Any], Any] = getattr(importlib.import_module(module), attribute)
        return factory

    @property
    def waits_for(self) -> str:
        """The module after whose import the patch is applied."""
        return self.trigger or self.module


@dataclass(frozen=True)
class Row:
    """One line of the report."""

    group: str
    patch: str
    target: str
    state: str
    reason: str
    instances: int | None = None
