"""Applied changes: what an attribute was before."""

import inspect
from dataclasses import dataclass
from typing import Any

from megatron_fluid.patches.engine.patch import Patch

__all__ = ["ABSENT", "Change", "own"]

ABSENT = object()  # the attribute was not in its owner's own dict: inherited, or missing


@dataclass(eq=False)
class Change:
    """What was changed, and what it was before."""

    patch: Patch
    owner: Any
    attribute: str
    before: Any  # the raw object in the owner's dict, or ABSENT
    original: Any  # what a reader of the attribute saw
    new: Any = None  # the raw object put in


def own(owner: Any, attribute: str) -> Any:
    """The owner's own attribute, unbound and not inherited; ABSENT if it has none."""
    if inspect.isdatadescriptor(getattr(type(owner), attribute, None)):
        return getattr(owner, attribute)  # in a slot, such as a function's __defaults__
    return vars(owner).get(attribute, ABSENT)
