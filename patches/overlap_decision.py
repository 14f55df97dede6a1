"""One negotiation for all parts of Megatron that are replaced: is a layer supported, do the ranks
agree, which path does it take; and one register of what came of it.

A layer is decided about in two steps. `announce`, when it is built, looks at settings and at the
built modules, and records for the start-up table what the layer is about to do. `settle`, in its
first forward, looks at the modules as they are by then. The ranks of its group exchange their
settings and findings once, through the group's store and within the timeout. Settings that differ
are a `ConfigError` on every rank. One rank's reason is every rank's, so that they never take
different paths. A backend that was asked for by name and is unavailable is a `ConfigError` on every
rank; under `auto` the layer keeps Megatron's own path.

Modules that are changed after that are a `ConfigError`, too (`refuse_change`), until
`patches.reset_layers()` lets every layer be decided about again.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_fluid import patches
from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.timeouts import wait_timeout_s
from megatron_fluid.config import FluidConfig, current_config
from megatron_fluid.errors import ConfigError, ranks_text
from megatron_fluid.patches.rank_findings import Finding, exchange, left_out_word

__all__ = [
    "RELEASED",
    "Decision",
    "FeatureReport",
    "OverlapDecisions",
    "Reason",
    "features",
    "first_of_ranks",
    "is_choice",
    "settings_read",
]

# A change that `refuse_change` knows.
RELEASED = "the memory of expert weights was given back, as by offloading a model"
# (feature, on or off, reason): of how many objects it is true.
_features: dict[tuple[str, bool, str], int] = {}
# Keyed by layer and not stored in it: a layer is copied, pickled and walked by others.
_reads: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()


def features() -> list[tuple[str, bool, str, int]]:
    """What was recorded: feature, on or off, reason, and for how many objects."""
    return [(*key, count) for key, count in _features.items()]


def settings_read() -> set[str]:
    """The fields of FluidConfig, among those that only some paths read, that a recorded layer
    reads."""
    return {name for names in _reads.values() for name in names}


class FeatureReport:
    """What became of one feature, object by object, for the start-up table and the log.

    Args:
        feature: its name.
        by_class: whether an object's reason starts with the name of its class.
    """

    def __init__(self, feature: str, by_class: bool = False) -> None:
        self.feature, self.by_class = feature, by_class
        self.said: set[str] = set()
        self._last: weakref.WeakKeyDictionary[Any, tuple[bool, str]] = weakref.WeakKeyDictionary()

    def note(
        self, layer: Any, on: bool, reason: str, say: bool = False, reads: Iterable[str] = ()
    ) -> None:
        """Record that the feature is on or off for a layer, and why, in place of what was recorded
        of it before; `say` prints it, too, once for each reason. reads: as for settings_read."""
        _reads[layer] = frozenset(reads)
        if self._last.get(layer) == (on, reason):
            return
        self.withdraw(layer)
        self._last[layer] = on, reason
        text = self._text(layer, reason)
        if say:
            self.say(on, text)
        self._count(on, text, 1)

    def withdraw(self, layer: Any) -> None:
        """Take back what was recorded of a layer."""
        if (before := self._last.pop(layer, None)) is not None:
            self._count(before[0], self._text(layer, before[1]), -1)

    def note_late(self, when: str, reason: str, ranks: Sequence[int] = (0,)) -> None:
        """Record and print, once, a reason that is known only after the start-up table."""
        if reason not in self.said:
            self._count(False, f"{when}: {reason}", 1)
            self.say(False, reason, f" {when}", ranks)

    def say(self, on: bool, text: str, when: str = "", ranks: Sequence[int] = (0,)) -> None:
        """Print each text once, on the first of the ranks that it is true of."""
        if text not in self.said:
            self.said.add(text)
            if not dist.is_initialized() or dist.get_rank() == ranks[0]:
                state = "on" if on else "off"
                of = f" ({ranks_text(ranks)})" if ranks[0] else ""
                print(f"megatron_fluid: {self.feature} {state}{when}{of}: {text}", flush=True)

    def _text(self, layer: Any, reason: str) -> str:
        return f"{type(layer).__name__}: {reason}" if self.by_class else reason

    def _count(self, on: bool, text: str, change: int) -> None:
        key = (self.feature, on, text)
        _features[key] = _features.get(key, 0) + change
        if _features[key] <= 0:
            del _features[key]


def global_ranks(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else [0]


def is_choice(reason: str) -> bool:
    """Whether Megatron's own path is what the user chose, or nothing to overlap: no warning."""
    return reason.startswith(
        ("moe_backend=", "cp_backend=", "expert_model_parallel_size=1", "the patch ", "auto: ")
    )


def first_of_ranks(reasons: Sequence[str | None]) -> str | None:
    """The first rank's reason, with the rank; None where no rank has one."""
    named = (f"rank {rank} of the group: {reason}" for rank, reason in enumerate(reasons) if reason)
    return next(named, None)


class Reason(str):
    """Why a layer keeps Megatron's own path, in one sentence."""


@dataclass
class Decision[Path]:
    """What a layer does under the settings that were in force when it was built.

    Attributes:
        config: those settings.
        backend: who moves its data, as was expected when it was built; None where Megatron does.
        reason: why it keeps Megatron's own path, as far as this rank knows; or None.
        settled: whether the ranks of its group have agreed.
        path: what serves the layer from call to call, once that is settled; with a reason, what
            serves a part of it.
        group: the ranks that agree, or None where there is nothing to agree on.
    """

    config: FluidConfig
    backend: str | None = None
    reason: str | None = None
    settled: bool = False
    path: Path | None = None
    group: dist.ProcessGroup | None = None


class OverlapDecisions[Path]:
    """The decisions about the layers of one kind. A subclass says what is particular to it.

    Attributes:
        feature: what the reports call it.
        patch: the patch of the layer's forward.
        setting: the field of FluidConfig that asks for a backend.
        compared: fields of the layer's TransformerConfig that must be alike on all ranks.
    """

    feature: str
    patch: str
    setting: str
    compared: tuple[str, ...] = ("params_dtype", "hidden_size")

    def __init__(self) -> None:
        self._decisions: weakref.WeakKeyDictionary[Any, Decision[Path]]
        self._decisions = weakref.WeakKeyDictionary()
        self.get = self._decisions.get  # every forward looks here
        self.report = FeatureReport(self.feature)

    # ---- what a subclass says ----

    def is_layer(self, module: Any) -> bool:
        """Whether a module is one of these layers."""
        raise NotImplementedError

    def concerns(self, layer: Any) -> bool:
        """Whether there is anything to decide about a layer."""
        return True

    def group(self, layer: Any) -> dist.ProcessGroup:
        """The ranks that have to agree."""
        raise NotImplementedError

    def setting_reason(self, config: FluidConfig, layer: Any) -> str | None:
        """Why settings, alike on all ranks, keep Megatron's own path; or None."""
        raise NotImplementedError

    def backend_of(self, config: FluidConfig, layer: Any) -> str:
        """The backend that a supported layer is about to take."""
        raise NotImplementedError

    def describe(self, backend: str, layer: Any) -> str:
        """The start-up table's words for an overlapped layer."""
        raise NotImplementedError

    def reads(self, config: FluidConfig, layer: Any) -> Iterable[str]:
        """The fields of FluidConfig, among those that only some paths read, that an overlapped
        layer reads."""
        return ("defer_weight_grads",)

    def built_reason(self, layer: Any) -> str | None:
        """What the modules of a newly built layer, of this rank alone, have against it."""
        return None

    def find(self, config: FluidConfig, layer: Any) -> Finding:
        """What this rank finds in the layer in its first forward."""
        raise NotImplementedError

    def decide(self, config: FluidConfig, layer: Any, found: Sequence[Finding]) -> Path | Reason:
        """The path of a layer that no rank has found anything against, or why Megatron's own is
        kept. Collective.

        Args:
            config: the settings that the layer keeps.
            layer: the layer.
            found: what each rank of the group has found. [W]

        Raises:
            ConfigError: a backend was asked for by name and is unavailable.
        """
        raise NotImplementedError

    def allowed(self, config: FluidConfig, layer: Any, reason: str) -> str | None:
        """Where a backend was asked for by name: the values of the setting that the layer can have,
        and why. None where it was not."""
        raise NotImplementedError

    def rest(self, decision: Decision[Path], layer: Any) -> Path | None:
        """What else of a layer that is not overlapped is served here, for which no other rank is
        asked; or None."""
        return None

    def describe_kept(self, layer: Any, reason: str) -> str:
        """The reports' words for a layer that keeps Megatron's own path for that reason."""
        return reason

    # ---- the negotiation ----

    def announce_built(self, module: Any) -> None:
        """Announce a module that Megatron has built, if it is such a layer and was not announced
        yet; and count it for the report of patches."""
        if self.is_layer(module) and module not in self._decisions:
            decision = self.announce(module)
            if self.counts(decision):
                patches.count_instance(self.patch)

    def announcing(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap a constructor of Megatron's: what it has built is announced."""

        @functools.wraps(original)
        def fluid_init(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            self.announce_built(module)

        return fluid_init

    def counts(self, decision: Decision[Path]) -> bool:
        """Whether the report of patches counts the layer."""
        return decision.backend is not None

    def announce(self, layer: Any, late: bool = False) -> Decision[Path]:
        """Decide about a layer under the configuration in force, which it keeps, as far as this
        rank can; and record it for the start-up table.

        Args:
            layer: the layer.
            late: it is being called already, so that the ranks have to agree before one of them
                may refuse what it alone has found.

        Raises:
            ConfigError: a backend was asked for by name and cannot be had.
        """
        config = current_config()
        decision: Decision[Path] = Decision(config)
        self._decisions[layer] = decision
        if not self.concerns(layer):
            decision.settled = True
            return decision
        decision.group = self.group(layer)
        left_out = self._left_out(layer)
        decision.settled = left_out is not None  # its forward is Megatron's, and never comes here
        if left_out is not None and not late:
            # For the errors of ranks that will wait for this one.
            words, limit_s = agreement(self.group(layer)), wait_timeout_s(None)
            words.leave(left_out_word(self.feature), left_out, limit_s)
        decision.reason = left_out or self.setting_reason(config, layer)
        decision.reason = decision.reason or self.built_reason(layer)
        if decision.reason is None:
            decision.backend = self.backend_of(config, layer)
            text, reads = self.describe(decision.backend, layer), self.reads(config, layer)
            self.report.note(layer, True, text, reads=reads)
            return decision
        if decision.settled or not late:
            self._refuse_if_named(config, layer, decision.reason)
        self.report.note(layer, False, self.describe_kept(layer, decision.reason))
        return decision

    @torch.inference_mode(False)  # what a validation before training makes serves training, too
    def settle(self, layer: Any) -> Decision[Path]:
        """Look at the layer as it is in its first forward, and agree with the ranks of its group.
        Collective over the group.

        Raises:
            ConfigError: on every rank: a backend was asked for by name and is unavailable, or the
                ranks' settings differ.
            PeerTimeoutError: a rank of the group has not come within the timeout.
        """
        decision = self.get(layer)
        if decision is not None and self.regrouped(decision, layer):
            decision = None
        late = decision is None  # a copy, built before the patches were applied, or regrouped
        if decision is None:
            decision = self.announce(layer, late=True)
        if decision.settled:
            return decision
        patches.report_at_first_forward()
        mine, failure = Finding(decision.reason), None
        if mine.reason is None:
            try:
                mine = self.find(decision.config, layer)
            except Exception as error:  # which the other ranks have to know of
                mine, failure = Finding(None, error=f"{type(error).__name__}: {error}"), error
                print(f"megatron_fluid: {self.feature}: {mine.error}", file=sys.stderr, flush=True)
        name = f"{getattr(layer, 'layer_number', None)}"
        sizes = {field: getattr(layer.config, field, None) for field in self.compared}
        about = self.feature, name, sizes
        found = exchange(mine, self.group(layer), decision.config, *about)
        if failure is not None:
            raise failure
        reason = mine.reason or first_of_ranks([finding.reason for finding in found])
        if reason is None:
            outcome = self.decide(decision.config, layer, found)
            if isinstance(outcome, Reason):
                reason = outcome
            else:
                decision.path = outcome
        if reason is not None:
            self._refuse_if_named(decision.config, layer, reason)
            told, ranks = self.describe_kept(layer, reason), global_ranks(self.group(layer))
            if getattr(layer, "needs_no_patch", False) and not is_choice(reason):
                text = f"{type(layer).__name__} of the layer spec keeps Megatron's own path: {told}"
                self.report.say(False, f"WARNING: {text}", ranks=ranks)
            if late:
                self.report.say(False, told, ranks=ranks)
            elif decision.backend is not None:  # as the start-up table has said
                self.report.note_late("from the first call on", told, ranks)
            decision.backend, decision.path = None, self.rest(decision, layer)
        decision.reason, decision.settled = reason, True
        return decision

    def regrouped(self, decision: Decision[Path], layer: Any) -> bool:
        """Whether the layer's process group was destroyed and made again since the decision, as a
        framework does while others use its GPUs; the ranks then agree again."""
        return decision.group is not None and decision.group is not self.group(layer)

    def leave(self, layer: Any) -> None:
        """Let a built layer keep Megatron's own path: the other half of a comparison."""
        self._decisions[layer] = Decision(current_config(), settled=True)

    def refuse_change(self, layer: Any, changed: str) -> NoReturn:
        """Raise, in a call of a layer that was changed after the ranks of its group had agreed.

        Ranks that see no change wait for this one in an exchange: their errors name the change.

        Args:
            changed: what has changed.

        Raises:
            ConfigError: always.
        """
        group, name = self.group(layer), getattr(layer, "layer_number", None)
        whose = "" if group.size() == 1 else f" (rank {dist.get_rank()})"
        remedy = (
            "Make adapters, quantisers and hooks before the first forward, or call "
            "megatron_fluid.patches.reset_layers() on all ranks after the change"
        )
        if changed == RELEASED:
            remedy = "Load it again before the forward"
        text = f"{self.feature} {name}{whose} was changed after its first forward: {changed}. "
        text += remedy
        agreement(group).report_failure(None, text)  # others may wait for this rank
        raise ConfigError(text)

    def forget(self) -> None:
        """Decide about every layer again in its next forward, as about layers built before the
        patches were applied."""
        self._decisions.clear()

    def _left_out(self, layer: Any) -> str | None:
        """Why the layer's forward stays Megatron's, whatever is decided here: the user left the
        patch of it out; or None. A layer of a spec has a forward of its own."""
        own = getattr(layer, "needs_no_patch", False)
        why = None if own else patches.off_reason(self.patch)
        return None if why is None else f"the patch {self.patch} is left out: {why}"

    def _refuse_if_named(self, config: FluidConfig, layer: Any, reason: str) -> None:
        if (allowed := self.allowed(config, layer, reason)) is not None:
            raise ConfigError.of(self.setting, getattr(config, self.setting), allowed)
