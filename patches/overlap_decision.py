"""Decides for each Megatron layer that is replaced: is it supported, do the ranks of its group
agree, and which path does it take.

A layer is decided about in two steps. `announce`, when it is built, asks for a `reason` to keep
Megatron's own path, and records for the start-up report what the layer is about to do. `settle`, in
its first forward, asks again, since modules may have changed. The ranks of its group exchange their
settings and findings once, through the group's store and within the timeout. Settings that differ
are a `ConfigError` on every rank. If one rank has a reason, all keep Megatron's own path, so that
they never take different paths. A backend that was asked for by name and is unavailable is a
`ConfigError` on every rank; under `auto` the layer keeps Megatron's own path.

A later change of modules raises `ConfigError`, too (`refuse_change`), until
`patches.reset_layers()` makes every layer decide again.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_fluid import patches
from megatron_fluid.comm.agreement import agreement
from megatron_fluid.comm.groups import wait_timeout_s
from megatron_fluid.comm.layers import settings_difference
from megatron_fluid.config import FluidConfig, current_config
from megatron_fluid.errors import ConfigError, FluidError, PeerTimeoutError
from megatron_fluid.patches.features import FeatureReport

__all__ = [
    "RELEASED",
    "Decision",
    "Finding",
    "OverlapDecisions",
    "Reason",
    "exchange",
    "first_of_ranks",
    "is_choice",
    "refuse_change",
]

# The one change for which `refuse_change` names another remedy.
RELEASED = "the memory of expert weights was given back, as by offloading a model"


def is_choice(reason: str) -> bool:
    """Whether a reason needs no warning: the user chose Megatron's path, or nothing overlaps."""
    return reason.startswith(
        ("moe_backend=", "cp_backend=", "expert_model_parallel_size=1", "the patch ", "auto: ")
    )


def first_of_ranks(reasons: Sequence[str | None]) -> str | None:
    """The reason of all ranks; where only some have one, or they differ, the first with its rank;
    None where no rank has one."""
    if len(set(reasons)) == 1:
        return reasons[0]
    named = (f"rank {rank} of the group: {reason}" for rank, reason in enumerate(reasons) if reason)
    return next(named, None)


class Reason(str):
    """Why a layer keeps Megatron's own path, in one sentence."""


@dataclass(frozen=True)
class Finding:
    """What one rank reports to the others of its group.

    Attributes:
        reason: why its layer has to keep Megatron's own path, or None.
        details: this rank's data for the choice of a path.
        error: text of the exception raised while it examined the layer, or None.
    """

    reason: str | None
    details: Any = None
    error: str | None = None


def exchange(
    mine: Finding,
    group: dist.ProcessGroup,
    config: FluidConfig,
    feature: str,
    layer: str = "",
    sizes: Mapping[str, Any] = types.MappingProxyType({}),
) -> list[Finding]:
    """Return every rank's finding about a layer. Collective, through the group's store.

    Args:
        mine: this rank's finding.
        group: the ranks that have to agree.
        config: this rank's settings, which must be those of all ranks (FluidConfig.shared).
        feature: name of the feature, for errors.
        layer: name of the layer, the same on all ranks.
        sizes: sizes of the layer, the same on all ranks.

    Raises:
        ConfigError: on every rank: their settings or sizes differ.
        PeerTimeoutError: a rank has not come within the timeout.
        FluidError: the ranks are at different layers, or one of them has failed.
    """
    channel = agreement(group)
    if channel.alone:
        return [mine] * group.size()
    ranks, settings = channel.ranks, config.shared() | dict(sizes)
    limit_s = wait_timeout_s(group, config.timeout_s)
    try:
        reports = channel.gather(feature, (layer, settings, mine), limit_s)
    except PeerTimeoutError as error:
        raise error.with_detail(
            "Possible causes: a rank is lost, runs without megatron_fluid, or has this patch "
            "turned off"
        ) from None
    if text := settings_difference([{"layer": name} for name, _, _ in reports], ranks):
        raise FluidError(f"{feature}: the ranks of a group are at different layers: {text}")
    if text := settings_difference([settings for _, settings, _ in reports], ranks):
        raise ConfigError(f"{feature}: {text}; allowed: the same on all ranks of a group")
    found = [finding for _, _, finding in reports]
    for number, finding in enumerate(found):
        if finding.error is not None and number != group.rank():
            raise FluidError(f"{feature}: rank {ranks[number]} failed: {finding.error}")
    return found


def refuse_change(feature: str, layer: Any, group: dist.ProcessGroup, changed: str) -> NoReturn:
    """Raise because a layer was changed after the ranks of its group had agreed.

    Ranks that see no change wait for this rank in an exchange. It publishes the change, so that
    their errors name it.

    Args:
        feature: name of the feature.
        layer: the layer.
        group: the ranks that have agreed.
        changed: what has changed.

    Raises:
        ConfigError: always.
    """
    whose = "" if group.size() == 1 else f" (rank {dist.get_rank()})"
    remedy = (
        "Make adapters, quantisers and hooks before the first forward, or call "
        "megatron_fluid.patches.reset_layers() on all ranks after the change"
    )
    if changed == RELEASED:
        remedy = "Load it again before the forward"
    name = f"{feature} {getattr(layer, 'layer_number', None)}{whose}"
    text = f"{name} was changed after its first forward: {changed}. {remedy}"
    agreement(group).report_failure(None, text)  # others may wait for this rank
    raise ConfigError(text)


@dataclass
class Decision[Path]:
    """The decision about one layer, under the settings that were in force when it was built.

    Attributes:
        config: those settings.
        backend: the backend expected to move its data; None if Megatron moves it.
        reason: why it keeps Megatron's own path, as far as this rank knows; or None.
        settled: whether the ranks of its group have agreed.
        path: the object that runs the layer's calls, once settled. If there is a reason, it runs
            only a part of the layer, or is None.
        group: the ranks that have to agree, or None if there is nothing to agree on.
        details: data from the agreement that a subclass stores.
    """

    config: FluidConfig
    backend: str | None = None
    reason: str | None = None
    settled: bool = False
    path: Path | None = None
    group: dist.ProcessGroup | None = None
    details: Any = None


class OverlapDecisions[Path]:
    """The decisions about all layers of one kind. A subclass defines what differs by kind.

    Attributes:
        feature: its name in reports and errors.
        patch: the patch of the layer's forward.
        setting: the field of FluidConfig that asks for a backend.
        compared: fields of the layer's TransformerConfig that must be alike on all ranks.
    """

    feature: str
    patch: str
    setting: str
    compared: tuple[str, ...] = ("params_dtype", "hidden_size")

    def __init__(self) -> None:
        # Keyed by layer and not stored in it: a layer is copied, pickled and walked by others.
        self._decisions: weakref.WeakKeyDictionary[Any, Decision[Path]]
        self._decisions = weakref.WeakKeyDictionary()
        self.get = self._decisions.get  # called in every forward
        self.report = FeatureReport(self.feature)

    # ---- what a subclass defines ----

    def is_layer(self, module: Any) -> bool:
        """Whether a module is one of these layers."""
        raise NotImplementedError

    def concerns(self, layer: Any) -> bool:
        """Whether there is anything to decide about a layer."""
        return True

    def group(self, layer: Any) -> dist.ProcessGroup:
        """The ranks that have to agree."""
        raise NotImplementedError

    def reason(self, config: FluidConfig, layer: Any) -> str | None:
        """Why this rank's settings and modules keep Megatron's own path; or None."""
        raise NotImplementedError

    def backend_of(self, config: FluidConfig, layer: Any) -> str:
        """The backend that a supported layer is about to take."""
        raise NotImplementedError

    def describe(self, layer: Any) -> str:
        """Text about a decided layer for the reports."""
        raise NotImplementedError

    def find(self, config: FluidConfig, layer: Any) -> Finding:
        """Examine the layer on this rank, in its first forward."""
        return Finding(self.reason(config, layer))

    def decide(self, config: FluidConfig, layer: Any, found: Sequence[Finding]) -> Path | Reason:
        """Return the path of a layer for which no rank has a reason, or a Reason to keep
        Megatron's own. Collective.

        Args:
            config: the settings that the layer keeps.
            layer: the layer.
            found: what each rank of the group has found. [W]

        Raises:
            ConfigError: a backend was asked for by name and is unavailable.
        """
        raise NotImplementedError

    def allowed(self, config: FluidConfig, layer: Any, reason: str) -> str | None:
        """Return the values of the setting that would work for the layer, and why, if the user
        asked for a backend by name; otherwise None."""
        raise NotImplementedError

    def rest(self, decision: Decision[Path], layer: Any) -> Path | None:
        """Return what runs a part of a layer that keeps Megatron's path, or None. No other rank is
        asked."""
        return None

    # ---- the negotiation ----

    def announcing(self, original: Callable[..., None]) -> Callable[..., None]:
        """Wrap a constructor of Megatron: announce each layer that it builds, and count the layer
        in the report of patches."""

        @functools.wraps(original)
        def fluid_init(module: Any, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if self.is_layer(module) and self.announce(module).backend is not None:
                patches.count_instance(self.patch)

        return fluid_init

    def announce(self, layer: Any, late: bool = False) -> Decision[Path]:
        """Decide about a layer as far as this rank alone can, and record it for the start-up
        report. The layer keeps the configuration that is in force now.

        Args:
            layer: the layer.
            late: the layer is already being called. The ranks then have to agree before one of
                them may raise for a reason that it alone has found.

        Raises:
            ConfigError: a backend was asked for by name and is unavailable.
        """
        config = current_config()
        decision = self._decisions[layer] = Decision[Path](config)
        if not self.concerns(layer):
            decision.settled = True
            return decision
        decision.group = self.group(layer)
        left_out = self.left_out(layer)
        decision.settled = left_out is not None  # Megatron's forward never calls `settle`
        decision.reason = left_out or self.reason(config, layer)
        if decision.reason is None:
            decision.backend = self.backend_of(config, layer)
        elif decision.settled or not late:
            self._refuse_if_named(config, layer, decision.reason)
        if decision.settled or not late:
            self.report.note(layer, decision.reason is None, self.describe(layer))
        return decision

    @torch.inference_mode(False)  # tensors made here are used in training
    def settle(self, layer: Any) -> Decision[Path]:
        """Look at the layer as it is in its first forward, and agree with the ranks of its group.
        Collective over the group.

        Raises:
            ConfigError: on every rank: a backend was asked for by name and is unavailable, or the
                ranks' settings differ.
            PeerTimeoutError: a rank of the group has not come within the timeout.
        """
        decision = self.get(layer)
        if decision is None or self.regrouped(decision, layer):
            decision = self.announce(layer, late=True)  # copied, or built before the patches
        if decision.settled:
            return decision
        patches.report_at_first_forward()
        mine, failure = Finding(decision.reason), None
        if mine.reason is None:
            try:
                mine = self.find(decision.config, layer)
            except Exception as error:  # reported to the other ranks
                mine, failure = Finding(None, error=f"{type(error).__name__}: {error}"), error
                print(f"megatron_fluid: {self.feature}: {mine.error}", file=sys.stderr, flush=True)
        group, name = self.group(layer), f"{getattr(layer, 'layer_number', None)}"
        sizes = {field: getattr(layer.config, field, None) for field in self.compared}
        found = exchange(mine, group, decision.config, self.feature, name, sizes)
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
            decision.backend, decision.reason = None, reason
            decision.path = self.rest(decision, layer)
        real = isinstance(group, dist.ProcessGroup)
        ranks = dist.get_process_group_ranks(group) if real else [0]
        text = self.describe(layer)
        if reason and getattr(layer, "needs_no_patch", False) and not is_choice(reason):
            kept = f"{type(layer).__name__} of the layer spec keeps Megatron's own path"
            self.report.say(False, f"WARNING: {kept}: {text}", ranks=ranks)
        # Says nothing where the start-up report has said the same.
        self.report.note(layer, reason is None, text, ranks, " from this call on")
        decision.settled = True
        return decision

    def regrouped(self, decision: Decision[Path], layer: Any) -> bool:
        """Whether the layer's process group was destroyed and made again since the decision, as a
        framework does while others use its GPUs; the ranks then agree again."""
        return decision.group is not None and decision.group is not self.group(layer)

    def leave(self, layer: Any) -> None:
        """Make a built layer keep Megatron's own path, as the baseline of a comparison."""
        self._decisions[layer] = Decision(current_config(), settled=True)

    def forget(self) -> None:
        """Make every layer decide again in its next forward, like a layer that was built before
        the patches were applied."""
        self._decisions.clear()

    def left_out(self, layer: Any) -> str | None:
        """Why the layer's forward stays Megatron's, whatever is decided here: the user left out
        its patch. Otherwise None, as for a class from the layer spec, which needs no patch."""
        own = getattr(layer, "needs_no_patch", False)
        why = None if own else patches.off_reason(self.patch)
        return None if why is None else f"the patch {self.patch} is left out: {why}"

    def _refuse_if_named(self, config: FluidConfig, layer: Any, reason: str) -> None:
        if (allowed := self.allowed(config, layer, reason)) is not None:
            raise ConfigError.of(self.setting, getattr(config, self.setting), allowed)
