"""How the NVLink path cuts its work so that moving hides beside GEMMs.

Four ways. A push over NVLink needs few SMs, so the others plan and move arrived tokens into expert order meanwhile
(stream). Dispatch is cut by experts: fc1 of the first block starts when its tokens are there, the other blocks'
tokens travel meanwhile. Combine is cut by columns of fc2: a piece is summed and sent while the next is computed. Both
run on a second stream with a few SMs that the GEMMs leave free, because a grouped GEMM's persistent blocks fill every
SM they may have and nothing hides beside them otherwise.

Or no SM: sums are laid down in this rank's memory, which takes as long as reading the expert rows and no wire, and copy engines bring
them to their owners beside the next GEMM, which then has all SMs.

In the backward the gradient of the output is dispatched like the tokens, and dX may be combined beside the first of the
weight gradients, which need no exchange and take half of the backward's arithmetic.

Shapes: El local experts, H hidden.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from megatron_fluid.errors import ConfigError

__all__ = ["CANDIDATES", "NO_OVERLAP", "Schedule", "choose_schedule", "leave_sms"]


@dataclass(frozen=True)
class Schedule:
    """Pieces and SMs of one layer shape.

    expert_blocks: sizes of the blocks of local experts in which tokens are dispatched, () for one block. Exact mode
    only: in bounded mode one block is used, since a block's first row is not known to the host.
    column_pieces: pieces of fc2's output that are combined one beside the next, at least 1. sms: SMs that dispatch
    and combine may take beside a GEMM. 0: nothing runs beside a GEMM. stream: dispatch in chunks: a few SMs push
    while the others plan and move what has arrived into expert order (one expert block). combine_beside_weight_grads:
    in the backward, combine dX beside the first of the weight gradients. stream_combine: combine in one launch, whose chunks are
    added up while later ones travel (with one column piece). ahead: the share of fc2's columns, from 0 to below 1, whose sums copy
    engines send beside the GEMM of the others, in steps of 1024 columns or of a quarter to an eighth of H. staged_backward: dX's sums are
    sent so beside the weight gradients, where these are computed in the layer's own backward.
    """

    expert_blocks: tuple[int, ...] = ()
    column_pieces: int = 1
    sms: int = 0
    combine_beside_weight_grads: bool = False
    stream: bool = False
    stream_combine: bool = False
    ahead: float = 0.0
    staged_backward: bool = False
    sent_rows: bool = False

    def __post_init__(self) -> None:
        if self.sms < 0:
            raise ConfigError.of("sms", self.sms, "0 or more")
        if not 1 <= self.column_pieces <= 8:
            raise ConfigError.of("column_pieces", self.column_pieces, "1 to 8")
        if self.stream_combine and self.column_pieces > 1:
            raise ConfigError.of("column_pieces with stream_combine", self.column_pieces, "1")
        if not 0 <= self.ahead < 1:
            raise ConfigError.of("ahead", self.ahead, "from 0 to below 1")
        if self.staged and (self.stream_combine or self.column_pieces > 1 or self.combine_beside_weight_grads):
            raise ConfigError.of("ahead or staged_backward", self, "no other way of combining beside them")
        pieces = len(self.expert_blocks) > 1 or self.column_pieces > 1 or self.combine_beside_weight_grads
        if self.stream and len(self.expert_blocks) > 1:
            raise ConfigError.of("expert_blocks with stream", self.expert_blocks, "one block")
        if pieces and not self.sms:
            raise ConfigError.of("sms", 0, "more than 0 where anything is to run beside a GEMM")

    @property
    def staged(self) -> bool:
        """Whether copy engines send anything."""
        return self.ahead > 0 or self.staged_backward

    def columns(self, hidden: int) -> list[tuple[int, int]]:
        """(first column, width) of each piece of H columns; widths are multiples of 128, the last takes the rest."""
        width = -(-hidden // self.column_pieces // 128) * 128
        return [(c, min(width, hidden - c)) for c in range(0, hidden, width)]


NO_OVERLAP = Schedule()


def _halves(experts: int) -> tuple[int, ...]:
    return (experts // 2, experts - experts // 2)


# What benchmarks/moe_layer.py --schedules measures, by name: a schedule for El local experts, or None where there is none.
CANDIDATES: dict[str, Callable[[int], Schedule | None]] = {
    "whole": lambda experts: NO_OVERLAP,
    "stream": lambda experts: Schedule(stream=True),
    "staged_backward": lambda experts: Schedule(stream=True, staged_backward=True),
    "staged_half": lambda experts: Schedule(stream=True, ahead=0.5, staged_backward=True),
    "staged_most": lambda experts: Schedule(stream=True, ahead=0.75, staged_backward=True),
    "sent": lambda experts: Schedule(sent_rows=True),
    "stream_sent": lambda experts: Schedule(stream=True, sent_rows=True),
    "stream_both": lambda experts: Schedule(stream=True, stream_combine=True),
    "stream_both_beside24": lambda experts: Schedule((), 1, 24, True, True, stream_combine=True),
    "stream_beside16": lambda experts: Schedule((), 1, 16, True, True),
    "stream_columns2_beside16": lambda experts: Schedule((), 2, 16, True, True),
    "stream_columns4_beside16": lambda experts: Schedule((), 4, 16, True, True),
    "stream_columns4_beside24": lambda experts: Schedule((), 4, 24, True, True),
    "halves_columns2_beside8": lambda experts: Schedule(_halves(experts), 2, 8, True) if experts > 1 else None,
    "halves_columns4_beside16": lambda experts: Schedule(_halves(experts), 4, 16, True) if experts > 1 else None,
}


_STREAMED_BYTES = 30e6
_BESIDE_SMS = 16
# As H200s reach them with rows of tokens and grouped GEMMs.
_WIRE_BYTES_PER_SECOND, _MEMORY_BYTES_PER_SECOND, _SM_FLOPS = 350e9, 3.5e12, 600e12 / 132


def choose_schedule(
    max_tokens: int, hidden: int, ffn: int, top_k: int, num_experts: int, ranks: int
) -> Schedule:  # one place for every shape; a shape alone decides, so ranks cannot diverge
    """The schedule of a layer shape.

    Dispatch is streamed where a rank sends enough for it and the wire is busy for twice as long as moving tokens into expert order
    takes: that begins when the host knows the rows, and by fewer programs, which leave the push room. The bound is a choice between
    two GPUs, where one takes as long as the other and the streamed forward of deepseek-v3 took 2% longer (commit 8e27701), and four,
    where at commit c868ad2 it took 1 to 3% less in qwen3-235b and olmoe, and 4 to 5% more in deepseek-v3 and mixtral, in a run whose
    variants did not stand behind the hottest equally often.

    In the backward dX is combined beside the gradient of fc2's weights where its time on the wire is more than what that GEMM
    takes longer without the SMs. By how much is within what the order of timed variants makes: of deepseek-v3 on four H200, at
    commit c868ad2, a step took 17.16 ms, one kernel after the other 16.94. Not where it would raise the peak of memory, which
    is with the gradient of fc1's weights else: dX's rows are held beside the gradient of fc2's, with what that is made of.

    The CANDIDATES that leave SMs free beside GEMMs cut in pieces hide, on two and four GPUs, no more than they cost. Staged sums have not
    been measured on more than two, where as much is laid down as sent, so nothing chooses them yet.
    """
    share = 1.0 - (1.0 - 1.0 / ranks) ** top_k  # of a rank's tokens that any other rank gets
    row = max_tokens * hidden * 2  # bytes of each token's row
    sent = row * (ranks - 1) * share
    moved = row * top_k + row + sent  # written for the experts, read of what is here and what lands
    gemm = 2.0 * max_tokens * top_k * hidden * ffn / _SM_FLOPS  # seconds of one SM
    pays = sent / _WIRE_BYTES_PER_SECOND > gemm / 132 * _BESIDE_SMS / (132 - _BESIDE_SMS)
    held = max_tokens * top_k * (2 * hidden + ffn)  # elements of dX's rows, of fc2's gradient's and input's
    beside = pays and held <= num_experts // ranks * 2 * ffn * hidden
    sms = _BESIDE_SMS if beside else 0
    stream = sent >= _STREAMED_BYTES and sent * _MEMORY_BYTES_PER_SECOND >= 2.0 * moved * _WIRE_BYTES_PER_SECOND
    return Schedule(sms=sms, combine_beside_weight_grads=beside, stream=stream)


def leave_sms(sms: int) -> contextlib.AbstractContextManager[None]:
    """Torch's persistent GEMMs launched inside leave `sms` SMs free (its carve-out); 0 changes nothing. Our own grouped
    GEMMs take the number of SMs as an argument.
    """
    return _carve_out(sms) if sms else _NOTHING


_NOTHING = contextlib.nullcontext()


@functools.cache
def _expect_torchs_warning() -> None:
    """Torch says at the first carve-out that it may remove it: then GEMMs take all SMs, and what runs beside them waits. Once, since every
    change of the filters makes Python repeat the warnings of others.
    """
    warnings.filterwarnings("ignore", message="Setting the SM carveout for matmuls")


@contextlib.contextmanager
def _carve_out(sms: int) -> Iterator[None]:
    _expect_torchs_warning()
    before = torch._C._get_sm_carveout_experimental()
    torch._C._set_sm_carveout_experimental(sms)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(before)
