"""Applied changes: what an attribute was before, and which objects were built before a patch."""

import gc
import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fluid.patches.engine.patch import Patch

__all__ = ["ABSENT", "Change", "built_before", "own"]

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


def built_before(changes: Sequence[Change]) -> dict[str, str]:
    """Warnings by patch, if objects exist of a class whose `__init__` it replaces. Walks over the
    process's objects once for all patches, because that is slow."""
    inits = [c for c in changes if c.attribute == "__init__" and isinstance(c.owner, type)]
    found: Counter[str] = Counter()
    if inits:
        owners = tuple(change.owner for change in inits)
        kinds = Counter(type(thing) for thing in gc.get_objects())
        for kind in [kind for kind in kinds if issubclass(kind, owners)]:
            for change in inits:
                if issubclass(kind, change.owner):
                    found[change.patch.name] += kinds[kind]
    return {
        change.patch.name: f"{found[change.patch.name]} {change.owner.__name__} built before it "
        "were made without it"
        for change in inits
        if found[change.patch.name]
    }
