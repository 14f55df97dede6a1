"""Forward and backward of the experts over NVLink, as plain functions on one rank.

    forward:  dispatch x -> fc1 -> activation * probability -> fc2 -> combine
    backward: dispatch dy -> dgrad of fc2 -> activation's backward -> dgrad of fc1 -> weight
    gradients -> combine dx

The backward dispatches and combines with the forward's RoutingHandle. What runs beside what is the
domain's Schedule.

Shapes: T tokens of this rank, K top-k, El local experts, H hidden, F ffn (F1 = 2F when gated: gate
first), N expert rows of this rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fluid.cuda.triton_launch import Launch, power_of_two
from megatron_fluid.kernels.activation import (
    ACTIVATIONS,
    activation_backward_kernel,
    activation_kernel,
    backward_program,
)
from megatron_fluid.kernels.grouped_gemm import (
    can_gate,
    can_send,
    gated_matmul,
    grouped_matmul,
    sent_matmul,
)
from megatron_fluid.moe.experts import ExpertWeights
from megatron_fluid.moe.nvlink.buffers import NvlinkBuffers, RoutingHandle
from megatron_fluid.moe.nvlink.steps import (
    begin_combine,
    make_plan,
    owners,
    push,
    reduce,
    reduce_push,
    scatter,
    send_rows,
    settle,
    stream_push,
    stream_scatter,
)

__all__ = [
    "Backward",
    "SavedForward",
    "backward_dx",
    "forward_pass",
    "recompute_hidden",
    "recompute_rows",
]


@dataclass
class SavedForward:
    """What the backward of one call needs. rows [N, H]: the dispatched tokens; hidden: the output
    of fc1 [N, F1], None where it was not kept.
    """

    handle: RoutingHandle
    rows: Tensor
    hidden: Tensor | None
    activation: str


@dataclass
class Backward:
    """The result of backward_dx, and what the weight gradients are made of.

    dx [T, H], dprobs fp32 [T, K]: complete on the current stream after finish(). fc2: the gradients
    [N, H] of its output and its input [N, F], which give dw2; to be emptied by then, so that dw1
    may have their memory. grad_hidden [N, F1] gives dw1 with the forward's rows.
    """

    dx: Tensor
    dprobs: Tensor
    fc2: list[Tensor]
    grad_hidden: Tensor
    finish: Callable[[], object]


def _forward_matrices(fc: ExpertWeights) -> Tensor | list[Tensor]:
    """[in, out] matrices, a stacked view where there is one."""
    return [m.t() for m in fc.matrices] if fc.transposed is None else fc.transposed


def _backward_matrices(fc: ExpertWeights) -> Tensor | list[Tensor]:
    """[out, in] matrices."""
    return fc.matrices if fc.stack is None else fc.stack


_forward_launches: dict[tuple[str, int, torch.dtype], Launch] = {}
_backward_launches: dict[tuple[str, int, torch.dtype], tuple[Launch, int]] = {}


def _activate(
    hidden: Tensor, prob: Tensor, count: Tensor, out: Tensor, activation: str, sms: int
) -> None:
    """out [n, F] = act(hidden [n, F1]) * prob [n] for the first `count` rows (int32, on the
    device)."""
    code, gated = ACTIVATIONS[activation]
    if not hidden.shape[0]:
        return
    width = out.shape[1]
    block = min(1024, power_of_two(width))
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
    """From grad [n, F], the gradient of the activation's output: that output again, grad_hidden [n,
    F1] and row_grad fp32 [n]. sms: where most of the n rows may be empty, the SMs to fill with
    programs in place of one program a row.
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


def _send(domain: NvlinkBuffers, handle: RoutingHandle, x: Tensor, plan: bool = False) -> None:
    """Send x [T, H]. `plan`: the handle was only published, its tables are made here.

    Streamed, a few SMs push on the side stream while the others plan and then scatter what has
    arrived.
    """
    if domain.schedule.stream:
        domain.fork()
        stream_push(domain, handle, x, domain.side)
    if plan:
        make_plan(domain, handle)
    if not domain.schedule.stream:
        push(domain, handle, x)


def _receive(domain: NvlinkBuffers, handle: RoutingHandle, x: Tensor) -> Tensor:
    """The expert rows [N, H] of what was sent."""
    rows = x.new_empty(handle.buffer_rows, domain.hidden)
    if not domain.schedule.stream:
        return scatter(domain, handle, x, rows)
    stream_scatter(domain, handle, x, rows)
    domain.join()  # x is the caller's again
    return rows


def _multiply(
    domain: NvlinkBuffers, handle: RoutingHandle, x: Tensor, weights: Tensor | list[Tensor]
) -> Tensor:
    """x [N, in] times El matrices [in, out]."""
    return grouped_matmul(x, weights, handle.offsets, handle.ends, domain.sms)


def _multiply_and_send(
    domain: NvlinkBuffers,
    handle: RoutingHandle,
    x: Tensor,
    weights: Tensor | list[Tensor],
    row_grad: Tensor | None = None,
) -> None:
    """x [N, in] times El matrices [in, H], towards the tokens' ranks; with the probabilities'
    gradients row_grad fp32 [N], if given."""
    if not domain.schedule.sent_rows:
        reduce_push(domain, handle, _multiply(domain, handle, x, weights), row_grad)
        return
    begin_combine(domain, handle, row_grad)
    if isinstance(weights, Tensor) and can_send(x, weights):
        sent_matmul(x, weights, handle.offsets, owners(domain, handle), domain.sms)
    else:
        send_rows(domain, handle, _multiply(domain, handle, x, weights))


def forward_pass(
    domain: NvlinkBuffers,
    handle: RoutingHandle,
    x: Tensor,
    fc1: ExpertWeights,
    fc2: ExpertWeights,
    activation: str,
    plan: bool = True,
    bounded: bool = False,
    keep: bool = True,
) -> tuple[Tensor, SavedForward]:
    """y [T, H] and what the backward needs, from x [T, H]. `plan`: the handle is published and is
    planned here. `keep`: the output of fc1 is saved; without it, it may never be written.
    """
    _send(domain, handle, x, plan)
    result = x.new_empty(handle.num_tokens, domain.hidden)
    if plan and not bounded:
        # The host waits here. What can be done before is done before: nothing but launches should
        # follow.
        handle.ends = domain.read_offsets()
    rows = _receive(domain, handle, x)
    activated = x.new_empty(handle.buffer_rows, fc2.in_width)
    matrices = _forward_matrices(fc1)
    hidden: Tensor | None
    if isinstance(matrices, Tensor) and can_gate(rows, matrices, handle.row_prob, activation):
        ends = (
            domain.earlier_offsets() if handle.ends is None else handle.ends
        )  # tiles are chosen by them
        hidden = gated_matmul(
            rows, matrices, handle.offsets, handle.row_prob, activated, keep, domain.sms, ends
        )
    else:
        hidden = _multiply(domain, handle, rows, matrices)
        _activate(hidden, handle.row_prob, handle.row_count, activated, activation, domain.sms)
    _multiply_and_send(domain, handle, activated, _forward_matrices(fc2))
    reduce(domain, handle, result)
    return result, SavedForward(handle, rows, hidden if keep else None, activation)


def recompute_rows(domain: NvlinkBuffers, handle: RoutingHandle, x: Tensor) -> Tensor:
    """The dispatched tokens [N, H] of a forward that did not keep them."""
    _send(domain, handle, x)
    rows = _receive(domain, handle, x)
    settle(domain)
    return rows


def recompute_hidden(
    domain: NvlinkBuffers, handle: RoutingHandle, rows: Tensor, fc1: ExpertWeights
) -> Tensor:
    """The output of fc1 [N, F1] of a forward that did not keep it."""
    return _multiply(domain, handle, rows, _forward_matrices(fc1))


def backward_dx(
    domain: NvlinkBuffers,
    saved: SavedForward,
    grad: Tensor,
    fc1: ExpertWeights,
    fc2: ExpertWeights,
    consume: bool = False,
) -> Backward:
    """The gradients of x and of the probabilities from grad [T, H]; the weights' gradients are the
    caller's to compute before finish(), beside what is still on its way. `consume`: what was saved
    of fc1's output is not asked for again, and its gradient may take its place.
    """
    handle, hidden = saved.handle, saved.hidden
    assert hidden is not None
    _send(domain, handle, grad)
    grad_rows = _receive(domain, handle, grad)
    count = handle.buffer_rows
    grad_hidden = hidden if consume else grad.new_empty(count, fc1.out_width)
    row_grad = torch.empty(count, dtype=torch.float32, device=grad.device)
    # The activation's output takes the place of its gradient.
    activated = _multiply(domain, handle, grad_rows, _backward_matrices(fc2))
    _activate_backward(
        hidden,
        handle.row_prob,
        handle.row_count,
        activated,
        activated,
        grad_hidden,
        row_grad,
        saved.activation,
        domain.sms if handle.ends is None else None,
    )
    dx = grad.new_empty(handle.num_tokens, domain.hidden)
    dprobs = grad.new_empty(handle.num_tokens, domain.top_k, dtype=torch.float32)
    _multiply_and_send(domain, handle, grad_hidden, _backward_matrices(fc1), row_grad)
    # After the weight gradients: a peer that is late has had their time to arrive.
    finish = functools.partial(reduce, domain, handle, dx, dprobs)
    return Backward(dx, dprobs, [grad_rows, activated], grad_hidden, finish)
