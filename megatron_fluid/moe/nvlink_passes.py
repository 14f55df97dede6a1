"""Forward and backward of the experts over NVLink, as plain functions on one rank.

    forward:  dispatch x -> fc1 -> activation * probability -> fc2 -> combine
    backward: dispatch dy -> dgrad of fc2 -> activation's backward -> dgrad of fc1 -> combine dx; weight gradients beside
              or after it

The backward dispatches and combines with the forward's RoutingHandle. What runs beside what is the domain's Schedule.

Shapes: T tokens of this rank, K top-k, El local experts, H hidden, F ffn (F1 = 2F when gated: gate first), N expert
rows of this rank.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.kernels.activation import (
    ACTIVATIONS,
    activation_backward_kernel,
    activation_kernel,
    backward_program,
)
from megatron_fluid.kernels.grouped_gemm import can_gate, can_send, gated_matmul, grouped_matmul, sent_matmul
from megatron_fluid.kernels.launch import Launch
from megatron_fluid.moe.experts import ExpertWeights
from megatron_fluid.moe.nvlink_domain import NvlinkDomain, RoutingHandle
from megatron_fluid.moe.nvlink_path import (
    begin_combine,
    make_plan,
    meet,
    owners,
    push,
    reduce,
    reduce_push,
    scatter,
    send_rows,
    send_staged,
    settle,
    stream_combine,
    stream_push,
    stream_scatter,
    sum_choices,
)
from megatron_fluid.moe.nvlink_schedule import leave_sms

__all__ = [
    "Backward",
    "SavedForward",
    "backward_dx",
    "forward_pass",
    "hidden_again",
    "rows_again",
]


@dataclass
class SavedForward:
    """What the backward of one call needs. rows [N, H]: the dispatched tokens; hidden: the output of fc1 [rows, F1]
    per expert block, none where it was not kept.
    """

    handle: RoutingHandle
    rows: Tensor
    hidden: list[Tensor]
    activation: str


@dataclass
class Backward:
    """The result of backward_dx, and what the weight gradients are made of.

    dx [T, H], dprobs fp32 [T, K]: complete on the current stream after finish(). fc2: the gradients [N, H] of its output
    and its input [N, F], which give dw2; to be emptied by then, so that dw1 may have their memory. grad_hidden [N, F1]
    gives dw1 with the forward's rows. sms: to be left free by the first of the weight gradients. release(): after the
    first and before the second, waits until what dX's combine reads has been read, so that the second may have its memory.
    """

    dx: Tensor
    dprobs: Tensor
    fc2: list[Tensor]
    grad_hidden: Tensor
    sms: int
    finish: Callable[[], object]
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Block:
    """Rows of local experts [first, last) that have landed: `rows` [n, H] is rows[start : start + n] of all; offsets
    int32 [last - first].
    """

    index: int
    first: int
    last: int
    start: int
    rows: Tensor
    offsets: Tensor
    ends: Sequence[int] | None  # offsets on the host, in exact mode
    sms: int  # to be left free by the GEMMs on these rows
    count: Tensor  # offsets[-1:]
    alone: bool = False

    def part(self, whole: Tensor) -> Tensor:
        """This block's rows of a tensor over all rows, or all of it where it is the only block."""
        if self.alone:
            return whole
        return whole[self.start : self.start + self.rows.shape[0]]


def _forward_matrices(fc: ExpertWeights, first: int = 0, last: int | None = None, columns: slice | None = None):
    """[in, out] matrices of experts [first, last), a stacked view where there is one; `columns` of the output alone."""
    if fc.stack is not None:
        if last is None and columns is None:
            return fc.transposed
        part = fc.stack if last is None else fc.stack[first:last]
        return (part if columns is None else part[:, columns]).transpose(1, 2)
    return [(m if columns is None else m[columns]).t() for m in fc.matrices[first:last]]


def _backward_matrices(fc: ExpertWeights, first: int = 0, last: int | None = None) -> Tensor | list[Tensor]:
    """[out, in] matrices of experts [first, last)."""
    if fc.stack is not None:
        return fc.stack if last is None else fc.stack[first:last]
    return fc.matrices[first:last]


_forward_launches: dict[tuple[str, int, torch.dtype], Launch] = {}
_backward_launches: dict[tuple[str, int, torch.dtype], tuple[Launch, int]] = {}


def _activate(hidden: Tensor, prob: Tensor, count: Tensor, out: Tensor, activation: str, sms: int) -> None:
    """out [n, F] = act(hidden [n, F1]) * prob [n] for the first `count` rows (int32, on the device)."""
    code, gated = ACTIVATIONS[activation]
    if not hidden.shape[0]:
        return
    width = out.shape[1]
    block = min(1024, 1 << (width - 1).bit_length())
    columns = -(-width // block)
    key = (activation, width, hidden.dtype)
    launch = _forward_launches.get(key)
    if launch is None:
        constants = {"F": width, "CODE": code, "GATED": gated, "BLOCK": block}
        launch = _forward_launches[key] = Launch(activation_kernel, 4, constants)
    launch((max(1, sms * 16 // columns), columns), (hidden, prob, out, count))


def _activate_backward(
    hidden: Tensor,
    prob: Tensor,
    count: Tensor,
    grad: Tensor,
    activated: Tensor,
    grad_hidden: Tensor,
    row_grad: Tensor,
    activation: str,
    sms: int | None = None,
) -> None:
    """From grad [n, F], the gradient of the activation's output: that output again, grad_hidden [n, F1] and row_grad
    fp32 [n]. sms: where most of the n rows may be empty, the SMs to fill with programs in place of one program a row.
    """
    code, gated = ACTIVATIONS[activation]
    if not hidden.shape[0]:
        return
    width = grad.shape[1]
    key = (activation, width, hidden.dtype)
    found = _backward_launches.get(key)
    if found is None:
        block, warps, held = backward_program(width)
        constants = {"F": width, "CODE": code, "GATED": gated, "BLOCK": block}
        found = _backward_launches[key] = Launch(activation_backward_kernel, warps, constants), held
    launch, held = found
    programs = hidden.shape[0] if sms is None else min(hidden.shape[0], sms * held)
    launch((programs, 1), (hidden, prob, grad, grad_hidden, activated, row_grad, count))


def _whole(domain: NvlinkDomain, handle: RoutingHandle, rows: Tensor) -> Iterator[Block]:
    block = Block(0, 0, domain.local_experts, 0, rows, handle.offsets, handle.ends, 0, handle.row_count, alone=True)
    return iter([block])


def _send(domain: NvlinkDomain, handle: RoutingHandle, x: Tensor, plan: bool = False) -> None:
    """Send x [T, H]. `plan`: the handle was only published, its tables are made here.

    Streamed, a few SMs push on the side stream while the others plan and then scatter what has arrived. Else blocks
    after the first travel on the side stream while the caller works on the earlier ones.
    """
    if len(domain.expert_blocks) == 1 and domain.schedule.stream:
        domain.fork()
        stream_push(domain, handle, x, domain.side)
        if plan:
            make_plan(domain, handle)
        return
    if plan:
        make_plan(domain, handle)
    push(domain, handle, x)
    if len(domain.expert_blocks) > 1:
        domain.fork()
        with domain.beside():
            push(domain, handle, x, 1, domain.schedule.sms)


def _receive(domain: NvlinkDomain, handle: RoutingHandle, x: Tensor) -> tuple[Tensor, Iterator[Block]]:
    """The expert rows [N, H] of what was sent, with an iterator over their blocks, each valid on the current stream when
    yielded.
    """
    sms, blocks = domain.schedule.sms, len(domain.expert_blocks)
    rows = x.new_empty(handle.buffer_rows, domain.hidden)
    if blocks == 1 and domain.schedule.stream:
        stream_scatter(domain, handle, x, rows)
        domain.join()  # x is the caller's again
        return rows, _whole(domain, handle, rows)
    if blocks == 1:
        return scatter(domain, handle, x, rows), _whole(domain, handle, rows)
    allocated = domain.mark()
    scatter(domain, handle, x, rows, 0)
    arrived = []
    with domain.beside():
        for block in range(1, blocks):
            if block > 1:
                push(domain, handle, x, block, sms)
            meet(domain, domain.dispatch_flags, block)
            domain.after(allocated)
            scatter(domain, handle, x, rows, block, sms)
            arrived.append(domain.mark())

    def each() -> Iterator[Block]:
        assert handle.ends is not None
        first = 0
        for index, last in enumerate(domain.block_ends):
            if index:
                domain.after(arrived[index - 1])
            start, end = handle.ends[first - 1] if first else 0, handle.ends[last - 1]
            beside = sms if index < blocks - 1 else 0
            ends = [e - start for e in handle.ends[first:last]]
            offsets = handle.block_offsets[first:last]
            yield Block(index, first, last, start, rows[start:end], offsets, ends, beside, offsets[-1:])
            first = last

    return rows, each()


def _multiply(
    domain: NvlinkDomain,
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    offsets: Tensor,
    ends: Sequence[int] | None,
    spare: int = 0,
) -> Tensor:
    """grouped_matmul that leaves `spare` SMs."""
    return grouped_matmul(x, weights, offsets, ends, max(2, domain.sms - spare))


def _multiply_and_send(
    domain: NvlinkDomain, handle: RoutingHandle, x: Tensor, weights: Tensor | Sequence[Tensor]
) -> None:
    """x [N, in] times weights, El of [in, H], into the inboxes of the tokens' ranks."""
    if isinstance(weights, Tensor) and can_send(x, weights):
        sent_matmul(x, weights, handle.offsets, owners(domain, handle), domain.sms)
    else:
        send_rows(domain, handle, _multiply(domain, x, weights, handle.offsets, handle.ends))


def _worth_staging(domain: NvlinkDomain, handle: RoutingHandle) -> bool:
    """Copy engines bring blocks of C rows, however few tokens there are: not where this rank knows of few. Peers may do otherwise."""
    return handle.ends is None or 2 * handle.ends[-1] >= domain.max_tokens * domain.top_k


def _fc2_and_combine(
    domain: NvlinkDomain, handle: RoutingHandle, activated: Tensor, fc2: ExpertWeights, out: Tensor
) -> None:
    """activated [N, F] through fc2, summed and sent back: out [T, H]. Pieces of columns combine beside the next piece's
    GEMM, or those that go ahead are sent beside it.
    """
    sms, pieces = domain.schedule.sms, domain.columns
    if domain.schedule.sent_rows:
        begin_combine(domain, handle)
        _multiply_and_send(domain, handle, activated, _forward_matrices(fc2))
        sum_choices(domain, handle, out)
        return
    if domain.ahead and _worth_staging(domain, handle):
        for first, last in ((0, domain.ahead), (domain.ahead, domain.hidden)):
            matrices = _forward_matrices(fc2, columns=slice(first, last))
            y = _multiply(domain, activated, matrices, handle.offsets, handle.ends)
            reduce_push(domain, handle, y, column=first, staged=first == 0)
            if first == 0:
                domain.fork()
                send_staged(domain, last)
        domain.join()
        reduce(domain, handle, out)
        return
    if len(pieces) == 1:
        y = _multiply(domain, activated, _forward_matrices(fc2), handle.offsets, handle.ends)
        if domain.schedule.stream_combine:
            stream_combine(domain, handle, y, out=out)
            return
        reduce_push(domain, handle, y)
        reduce(domain, handle, out)
        return
    kept = []  # until the streams have joined
    counted = None
    for piece, (column, width) in enumerate(pieces):
        with leave_sms(sms if piece else 0):
            matrices = _forward_matrices(fc2, columns=slice(column, column + width))
            y = _multiply(domain, activated, matrices, handle.offsets, handle.ends, sms if piece else 0)
        kept.append(y)
        if piece < len(pieces) - 1:
            domain.fork()
            with domain.beside():
                sent = _combine_piece(domain, handle, y, out, piece, sms)
            counted = sent if piece == 0 else counted
        else:
            domain.after(counted)  # the first piece's sending counts this combine, for the waits of all
            _combine_piece(domain, handle, y, out, piece, None)
    domain.join()


def _combine_piece(
    domain: NvlinkDomain, handle: RoutingHandle, y: Tensor, out: Tensor, piece: int, programs: int | None
) -> torch.cuda.Event | None:
    """Sum and send the columns y [N, width] of one piece, and add up what comes back into those of out [T, H]. Returns the
    mark at which this rank's sums have been sent.
    """
    column, width = domain.columns[piece]
    reduce_push(domain, handle, y, column=column, programs=programs)
    sent = domain.mark()
    meet(domain, domain.combine_flags, piece)
    reduce(domain, handle, out=out, column=column, width=width, meeting=False, programs=programs)
    return sent


def forward_pass(
    domain: NvlinkDomain,
    handle: RoutingHandle,
    x: Tensor,
    fc1: ExpertWeights,
    fc2: ExpertWeights,
    activation: str,
    plan: bool = True,
    bounded: bool = False,
    keep: bool = True,
) -> tuple[Tensor, SavedForward]:
    """y [T, H] and what the backward needs, from x [T, H]. `plan`: the handle is published and is planned here. `keep`:
    the output of fc1 is saved; without it, it may never be written.
    """
    _send(domain, handle, x, plan)
    result = x.new_empty(handle.num_tokens, domain.hidden)
    if plan and not bounded:
        # The host waits here. What can be done before is done before: nothing but launches should follow.
        handle.ends = domain.read_offsets()
    rows, blocks = _receive(domain, handle, x)
    activated = x.new_empty(handle.buffer_rows, fc2.in_width)
    hidden = []
    for block in blocks:
        whole = not (block.sms or block.index)
        prob, out = block.part(handle.row_prob), block.part(activated)
        matrices = _forward_matrices(fc1) if whole else _forward_matrices(fc1, block.first, block.last)
        if can_gate(block.rows, matrices, prob, activation):
            programs = max(2, domain.sms - block.sms)
            ends = domain.earlier_offsets() if block.ends is None else block.ends  # tiles are chosen by them
            h = gated_matmul(block.rows, matrices, block.offsets, prob, out, keep, programs, ends)
        else:
            with leave_sms(block.sms):
                h = _multiply(domain, block.rows, matrices, block.offsets, block.ends, block.sms)
            _activate(h, prob, block.count, out, activation, max(1, domain.sms - block.sms))
        if keep and h is not None:
            hidden.append(h)
    _fc2_and_combine(domain, handle, activated, fc2, result)
    return result, SavedForward(handle, rows, hidden, activation)


def rows_again(domain: NvlinkDomain, handle: RoutingHandle, x: Tensor) -> Tensor:
    """The dispatched tokens [N, H] of a forward that did not keep them."""
    _send(domain, handle, x)
    rows, blocks = _receive(domain, handle, x)
    for _ in blocks:  # until the last has arrived
        pass
    settle(domain)
    return rows


def hidden_again(domain: NvlinkDomain, handle: RoutingHandle, rows: Tensor, fc1: ExpertWeights) -> list[Tensor]:
    """The output of fc1 of a forward that did not keep it, per expert block."""
    hidden = _multiply(domain, rows, _forward_matrices(fc1), handle.offsets, handle.ends)
    if len(domain.expert_blocks) == 1:
        return [hidden]
    assert handle.ends is not None
    ends = [0, *(handle.ends[last - 1] for last in domain.block_ends)]
    return [hidden[start:end] for start, end in itertools.pairwise(ends)]


def backward_dx(
    domain: NvlinkDomain,
    saved: SavedForward,
    grad: Tensor,
    fc1: ExpertWeights,
    fc2: ExpertWeights,
    consume: bool = False,
    beside: bool = True,
) -> Backward:
    """The gradients of x and of the probabilities from grad [T, H]; the weights' gradients are the caller's to
    compute before finish(). `consume`: what was saved of fc1's output is not asked for again, and its gradient may take
    its place. `beside`: weight gradients will be computed before finish(), for dX's combine to run beside.
    """
    handle, schedule, weight_grads = saved.handle, domain.schedule, beside
    # A streamed combine's programs count on as many of every other rank, so there the schedule decides alone.
    beside = schedule.combine_beside_weight_grads and (beside or schedule.stream_combine)
    _send(domain, handle, grad)
    grad_rows, blocks = _receive(domain, handle, grad)
    count = handle.buffer_rows
    alone = len(domain.expert_blocks) == 1
    grad_hidden = saved.hidden[0] if alone and consume else grad.new_empty(count, fc1.out_width)
    # Of the only block, the activation's output takes the place of its gradient.
    activated = None if alone else grad.new_empty(count, fc2.in_width)
    row_grad = torch.empty(count, dtype=torch.float32, device=grad.device)
    for block in blocks:
        whole = not (block.sms or block.index)
        with leave_sms(block.sms):
            matrices = _backward_matrices(fc2) if whole else _backward_matrices(fc2, block.first, block.last)
            part = _multiply(domain, block.rows, matrices, block.offsets, block.ends, block.sms)
        activated = part if activated is None else activated
        _activate_backward(
            saved.hidden[block.index],
            block.part(handle.row_prob),
            block.count,
            part,
            block.part(activated),
            block.part(grad_hidden),
            block.part(row_grad),
            saved.activation,
            domain.sms if block.ends is None else None,
        )
    assert activated is not None
    dx = grad.new_empty(handle.num_tokens, domain.hidden)
    dprobs = grad.new_empty(handle.num_tokens, domain.top_k, dtype=torch.float32)
    if schedule.sent_rows:
        begin_combine(domain, handle, row_grad)
        _multiply_and_send(domain, handle, grad_hidden, _backward_matrices(fc1))
        add_up = functools.partial(sum_choices, domain, handle, dx, dprobs)
        return Backward(dx, dprobs, [grad_rows, activated], grad_hidden, 0, add_up)
    grad_x = _multiply(domain, grad_hidden, _backward_matrices(fc1), handle.offsets, handle.ends)
    if not beside and schedule.stream_combine:
        stream_combine(domain, handle, grad_x, row_grad, dx, dprobs)
        return Backward(dx, dprobs, [grad_rows, activated], grad_hidden, 0, lambda: None)
    staged = schedule.staged_backward and weight_grads and _worth_staging(domain, handle)
    if not beside:
        reduce_push(domain, handle, grad_x, row_grad, staged=staged)
        if staged:
            domain.fork()
            send_staged(domain, domain.hidden)

        def finish() -> None:
            # After the weight gradients: a peer that is late has had their time to arrive.
            if staged:
                domain.join()
            reduce(domain, handle, grads=dprobs, out=dx)

        return Backward(dx, dprobs, [grad_rows, activated], grad_hidden, 0, finish)
    domain.fork()
    with domain.beside():
        if schedule.stream_combine:
            stream_combine(domain, handle, grad_x, row_grad, dx, dprobs, schedule.sms)
            read = domain.mark()
        else:
            reduce_push(domain, handle, grad_x, row_grad, programs=schedule.sms)
            read = domain.mark()
            meet(domain, domain.combine_flags, 0)
            reduce(domain, handle, grads=dprobs, out=dx, meeting=False, programs=schedule.sms)
    kept = [grad_x, row_grad]  # in use by the side stream until then
    del grad_x, row_grad

    def release() -> None:
        domain.after(read)
        kept.clear()

    def join() -> None:
        domain.join()
        kept.clear()

    return Backward(dx, dprobs, [grad_rows, activated], grad_hidden, schedule.sms, join, release)
