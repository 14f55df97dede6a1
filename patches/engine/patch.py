"""Patches as data: a change to Megatron, and a line of the report about it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["APPLIED", "ARMED", "MEGATRON", "NOT_NEEDED", "OFF", "REVERTED", "Patch", "Row"]

ARMED, APPLIED, OFF, NOT_NEEDED, REVERTED = "armed", "applied", "off", "not needed", "reverted"

MEGATRON = "Megatron"  # the group of patches that are not of a mode of their own


@dataclass(frozen=True)
class Patch:
    """One change to Megatron (or, in CPU mode, to torch).

    Attributes:
        name: what users call it, in reports and in `--fluid-disable-patch`.
        target: "package.module:attribute" or "package.module:Class.method".
        replacement: "package.module:factory", or the factory itself; `factory(original)` returns
            the new object. The module is imported only when the patch is applied. A staticmethod or
            classmethod is unwrapped for the factory and wrapped again after it.
        reason: why this must be a patch and cannot be a layer spec or a setting; one sentence, it
            is shown to users.
        signature: the signature it was written for, as one writes it after `def name`: "(self, x,
            *, group=None)". Names, kinds and the presence of defaults must agree. None: not
            checked.
        versions: megatron-core versions it fits, "0.19.*" or a specifier such as ">=0.19.1,<0.20";
            None: every supported version. Outside them it is not needed.
        trigger: the module after whose import it is applied; by default the module of its target.
        when: decides at that moment whether it is needed.
        condition: what `when` asks, in words, for the report.
        group: heading in the report.
        adds: the target may be missing; its factory is then given None, and reverting takes the
            attribute away again.
    """

    name: str
    target: str
    replacement: str | Callable[[Any], Any]
    reason: str
    signature: str | None = None
    versions: str | None = None
    trigger: str | None = None
    when: Callable[[], bool] | None = None
    condition: str = ""
    group: str = MEGATRON
    adds: bool = False

    @property
    def module(self) -> str:
        """The module that holds the target."""
        return self.target.partition(":")[0]

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
