"""The engine that applies and reverts a table of patches (patch.py).

Arming registers an import hook for every module that a patch waits for, and imports nothing. When
one of these modules is imported (or already was), Megatron's version is checked, and the signature
of each target in it; then the patches that wait for it are applied. One that does not fit is left
out, with those that require it: a warning and the report name the patch, the target and both
signatures. A version outside the supported range turns all patches off, with a warning. In strict
mode both raise a `PatchError` instead, and every change is undone. Reverting restores the original
objects.
`apply()` imports all modules, checks all patches, then applies them.
"""

import dataclasses
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron_fluid.errors import ConfigError, PatchError
from megatron_fluid.patches.engine import signatures
from megatron_fluid.patches.engine.patch import (
    APPLIED,
    ARMED,
    MISFIT,
    NOT_NEEDED,
    OFF,
    REVERTED,
    Patch,
    Row,
)

__all__ = ["Engine"]

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


@dataclass
class Engine:
    """Applies a table of patches: those that fit, or in strict mode all or nothing.

    Args:
        patches: the table; names and targets are unique.
        version: returns the megatron-core version found; called when something is to be applied.
        supported: the versions this package supports, e.g. "0.19.*".
        allow_unsupported: whether the user overrides that range; then only signatures decide.
        strict: whether a patch that does not fit, or an unsupported version, is an error.
        disabled: names of patches that the user turned off.
        disabled_by: the variable or flag that named a patch, for the message.
        switched_off: the reason for patching nothing, or None.
        help_version: how to override the supported range, for the message.
        help_disable: how to turn one patch off, for the message; contains "{name}".

    Raises:
        ValueError: two patches share a name or a target.
    """

    patches: Sequence[Patch]
    version: Callable[[], str]
    supported: str
    allow_unsupported: Callable[[], bool] = lambda: False
    strict: Callable[[], bool] = lambda: True
    disabled: Callable[[], Iterable[str]] = tuple
    disabled_by: Callable[[str], str] = lambda name: "patch"
    switched_off: Callable[[], str | None] = lambda: None
    help_version: str = ""
    help_disable: str = ""
    _rows: dict[str, Row] = field(default_factory=dict, init=False)
    _changes: list[Change] = field(default_factory=list, init=False)
    _hooked: set[str] = field(default_factory=set, init=False)
    _armed: bool = field(default=False, init=False)
    _quiet: bool = field(default=False, init=False)  # hooks do nothing while apply() imports

    def __post_init__(self) -> None:
        for what in ("name", "target"):
            seen = [getattr(patch, what) for patch in self.patches]
            if twice := {x for x in seen if seen.count(x) > 1}:
                raise ValueError(f"patches: more than one with the {what} {sorted(twice)}")
        self._rows = {
            p.name: Row(p.group, p.name, p.target, REVERTED, "not armed") for p in self.patches
        }

    # --- what users call ---

    def arm(self) -> None:
        """Apply patches whose modules are imported, and hook the other modules. Idempotent.

        Raises:
            PatchError: in strict mode, a patch does not fit; nothing stays changed.
        """
        if self._armed or self._all_off():
            return
        self._armed = True
        self._turn_off_asked()
        for patch in self._open():
            self._set(patch, ARMED, f"takes effect when {patch.waits_for} is imported")
        waiting = list(dict.fromkeys(patch.waits_for for patch in self._open()))
        imported = [name for name in waiting if _imported(name)]
        self._apply_lot([patch for patch in self._open() if patch.waits_for in imported])
        for name in waiting:
            if name not in imported and name not in self._hooked:
                import wrapt  # only where something is to be hooked

                self._hooked.add(name)
                wrapt.register_post_import_hook(self._on_import, name)

    def apply(self, *names: str) -> None:
        """Import every module that the patches (all, or those named) wait for, check all patches,
        then apply all. Idempotent.

        Raises:
            PatchError: in strict mode, a patch does not fit, or its module cannot be imported;
                nothing stays changed.
            ConfigError: no patch of that name.
        """
        if self._all_off():
            return
        self._turn_off_asked()
        lot = [patch for patch in self._open() if not names or patch.name in self._known(names)]
        self._quiet = True
        try:
            for patch in lot:
                with self._leaving_out(patch):
                    self._import(patch)
        finally:
            self._quiet = False
        self._apply_lot([patch for patch in lot if patch in self._open()])

    def revert(self, *names: str) -> None:
        """Restore the objects that the patches (all, or those named) replaced. Idempotent.

        Raises:
            PatchError: other code has replaced a target since; that one is left as it is, all
                others are restored.
            ConfigError: no patch of that name.
        """
        chosen = self._known(names) if names else set(self._rows)
        if not names:
            self._armed = False
        foreign = self._undo([change for change in self._changes if change.patch.name in chosen])
        for patch in self._in_state(ARMED, APPLIED):
            if patch.name in chosen:
                self._set(patch, REVERTED, "reverted")
        if foreign:
            raise PatchError(
                "replaced by other code after megatron_fluid, left alone: " + "; ".join(foreign)
            )

    @contextmanager
    def patched(self, *names: str) -> Iterator[None]:
        """Apply the patches (all, or those named) for the block; revert those that it applied."""
        before = {change.patch.name for change in self._changes}
        self.apply(*names)
        try:
            yield
        finally:
            if applied := [c.patch.name for c in self._changes if c.patch.name not in before]:
                self.revert(*applied)

    def check_names(self, *names: str) -> None:
        """Raise ConfigError unless all are names of patches."""
        self._known(names, self.disabled_by)

    def disable(self, *names: str) -> None:
        """Turn patches off and revert them. Unlike after `revert`, `apply` does not apply them
        again."""
        self._turn_off(names)

    def count(self, name: str) -> None:
        """Count an object that runs patched code, for the report. Replacements call it."""
        row = self._row(name)
        self._rows[name] = dataclasses.replace(row, instances=(row.instances or 0) + 1)

    def is_applied(self, name: str) -> bool:
        """Whether the patch is applied now."""
        return self._row(name).state == APPLIED

    def off_reason(self, name: str) -> str | None:
        """Why the patch is turned off or does not fit, or None (also if it is not armed, or not
        needed here)."""
        row = self._row(name)
        return row.reason if row.state in (OFF, MISFIT) else None

    def version_problem(self) -> str | None:
        """What is wrong with the version found, and how to override it; None if it is
        supported."""
        found = self.version()
        if _matches(found, self.supported) or self.allow_unsupported():
            return None
        return f"megatron-core {found} found, {self.supported} supported. {self.help_version}"

    def report(self) -> list[Row]:
        """One row a patch, in the table's order."""
        return list(self._rows.values())

    # --- inside ---

    def _on_import(self, module: ModuleType) -> None:
        if self._armed and not self._quiet:
            lot = [p for p in self._open() if p.waits_for == module.__name__]
            self._apply_lot(lot, everywhere=False)

    def _apply_lot(self, lot: Sequence[Patch], everywhere: bool = True) -> None:
        """Check every patch of the lot, then apply those that fit; on any error undo all changes of
        this engine.

        Args:
            everywhere: whether other packages may hold functions of the modules.
        """
        try:
            if not lot or not self._version_serves():
                return
            changes = []
            for patch in lot:
                with self._leaving_out(patch):
                    if self._needed(patch):
                        changes.append(self._resolve(patch))
            for change in changes:
                with self._leaving_out(change.patch):
                    change.new = self._build(change)
            changes = [c for c in changes if self._rows[c.patch.name].state != MISFIT]
            for change in changes:
                self._install(change, everywhere)
        except BaseException as error:
            self._undo(self._changes)
            for patch in self._in_state(ARMED, APPLIED, REVERTED):
                self._set(patch, OFF, f"nothing is patched: {error}")
            raise
        for change in changes:
            self._set(change.patch, APPLIED, change.patch.reason)

    @contextmanager
    def _leaving_out(self, patch: Patch) -> Iterator[None]:
        """Leave the patch out where the block finds that it does not fit."""
        try:
            yield
        except (PatchError, ImportError) as error:
            if self.strict():
                raise
            self._leave_out(patch, str(error))

    def _leave_out(self, patch: Patch, reason: str) -> None:
        self._undo([change for change in self._changes if change.patch is patch])
        self._set(patch, MISFIT, reason)
        warnings.warn(f"megatron_fluid: {patch.name} is left out: {reason}", stacklevel=2)
        for other in self._in_state(ARMED, APPLIED, REVERTED):
            if patch.name in other.requires:
                self._leave_out(other, f"it needs {patch.name}, which is left out")

    def _import(self, patch: Patch) -> None:
        try:
            importlib.import_module(patch.waits_for)
        except ImportError as error:
            raise PatchError(
                f"cannot import {patch.waits_for} for the patch {patch.name!r}: {error}"
            ) from error

    def _version_serves(self) -> bool:
        """Whether the version found is supported; if not, all patches are off, or it is an error.

        Raises:
            PatchError: it is not, in strict mode.
        """
        if (problem := self.version_problem()) is None:
            return True
        if self.strict():
            raise PatchError(problem)
        for patch in self._in_state(ARMED, APPLIED, REVERTED):
            self._set(patch, OFF, problem)
        warnings.warn(f"megatron_fluid is off: {problem}", stacklevel=2)
        return False

    def _needed(self, patch: Patch) -> bool:
        if patch.when is not None and not patch.when():
            reason = f"only {patch.condition}" if patch.condition else "not needed here"
            self._set(patch, NOT_NEEDED, reason)
            return False
        return True

    def _resolve(self, patch: Patch) -> Change:
        """Find the target and check its signature. Changes nothing."""
        module_name, _, path = patch.target.partition(":")
        owner: Any = importlib.import_module(module_name)
        *parents, attribute = path.split(".")
        try:
            for parent in parents:
                owner = getattr(owner, parent)
            original = getattr(owner, attribute, *([None] if patch.adds else []))
        except AttributeError as error:
            raise PatchError(
                self._misfit(patch, patch.signature or "it to exist", f"nothing ({error})")
            ) from None
        before = own(owner, attribute)
        if isinstance(before, staticmethod | classmethod):
            original = before.__func__
        # Replacements of forwards do not call them wherever they serve.
        if attribute in ("forward", "_forward_impl") and module_name.startswith("megatron."):
            from megatron_fluid.patches.engine.module_hooks import is_foreign  # imports torch

            if is_foreign(original):
                raise PatchError(f"{path} was replaced by other code: import megatron_fluid first")
        if patch.signature is not None:
            self._check_signature(patch, signatures.of(original))
        return Change(patch, owner, attribute, before, original)

    def _check_signature(self, patch: Patch, found: signatures.Parameters | None) -> None:
        expected = signatures.parse(str(patch.signature))
        if not signatures.fits(expected, found):
            wanted, given = signatures.describe(expected), signatures.describe(found)
            raise PatchError(self._misfit(patch, wanted, given))

    def _misfit(self, patch: Patch, expected: str, found: str) -> str:
        return (
            f"the patch {patch.name!r} does not fit {patch.target}: expected {expected}, found "
            f"{found}, in megatron-core "
            f"{self.version()}. {self.help_disable.format(name=patch.name)}"
        )

    def _build(self, change: Change) -> Any:
        new = change.patch.factory(change.original)
        for kind in (staticmethod, classmethod):
            if isinstance(change.before, kind) and not isinstance(new, kind):
                new = kind(new)
        return new

    def _install(self, change: Change, everywhere: bool) -> None:
        setattr(change.owner, change.attribute, change.new)
        self._changes.append(change)
        if isinstance(change.owner, ModuleType):
            self._rebind(change.patch, change.original, change.new, everywhere)

    def _undo(self, changes: Sequence[Change]) -> list[str]:
        """Restore, last change first. Returns the targets that other code has replaced since."""
        foreign = []
        for change in reversed(list(changes)):
            self._changes.remove(change)
            if own(change.owner, change.attribute) is not change.new:
                foreign.append(change.patch.target)
                continue
            if change.before is ABSENT:
                delattr(change.owner, change.attribute)
            else:
                setattr(change.owner, change.attribute, change.before)
            if isinstance(change.owner, ModuleType):
                self._rebind(change.patch, change.new, change.original)
        return foreign

    def _rebind(self, patch: Patch, old: Any, new: Any, everywhere: bool = True) -> None:
        """Replace the old object in every module that holds it, since `from module import function`
        copies the reference; if not everywhere, in those of its own package. Functions of torch
        (in CPU mode) are replaced in Megatron alone."""
        if not callable(old) or not callable(new):
            return  # a flag or a number may be the same object elsewhere
        package = patch.module.partition(".")[0]
        near = ("megatron" if package == "torch" else package, "__main__")
        everywhere = everywhere and package != "torch"
        for name, module in list(sys.modules.items()):
            searched = everywhere or name.partition(".")[0] in near
            if searched and isinstance(module, ModuleType):
                for key in [key for key, value in list(vars(module).items()) if value is old]:
                    setattr(module, key, new)

    def _turn_off_asked(self) -> None:
        # An unknown name of a flag is left to Megatron's parser, which ends the job in one line.
        names = [n for n in self.disabled() if n in self._rows or self.disabled_by(n)[:2] != "--"]
        self._turn_off(names)

    def _turn_off(self, names: Iterable[str]) -> None:
        chosen = self._known(names, self.disabled_by)
        self._undo([change for change in self._changes if change.patch.name in chosen])
        for patch in self.patches:
            if patch.name in chosen:
                self._set(patch, OFF, "turned off by the user")

    def _all_off(self) -> bool:
        if (reason := self.switched_off()) is not None:
            for patch in self.patches:
                self._set(patch, OFF, reason)
        return reason is not None

    def _open(self) -> list[Patch]:
        return self._in_state(ARMED, REVERTED)

    def _in_state(self, *states: str) -> list[Patch]:
        return [patch for patch in self.patches if self._rows[patch.name].state in states]

    def _known(
        self, names: Iterable[str], named_by: Callable[[str], str] = lambda name: "patch"
    ) -> set[str]:
        names = set(names)
        if unknown := sorted(names - set(self._rows)):
            raise ConfigError.of(named_by(unknown[0]), ", ".join(unknown), ", ".join(self._rows))
        return names

    def _row(self, name: str) -> Row:
        return self._rows[self._known([name]).pop()]

    def _set(self, patch: Patch, state: str, reason: str) -> None:
        row = self._rows[patch.name]
        self._rows[patch.name] = dataclasses.replace(row, state=state, reason=reason)


def _imported(name: str) -> bool:
    """Whether the module's import is complete."""
    module = sys.modules.get(name)
    return module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    )


def _matches(version: str, versions: str) -> bool:
    from packaging.specifiers import (
        SpecifierSet,  # Megatron-Core requires packaging; without it nothing gets here
    )

    specifier = versions if versions[:1] in "<>=!~" else f"=={versions}"
    return SpecifierSet(specifier, prereleases=True).contains(version)
