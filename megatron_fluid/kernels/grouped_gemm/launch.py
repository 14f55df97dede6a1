"""Products of every expert's rows with its matrix, in one launch where a grouped GEMM takes them.

Three implementations: our kernels on Hopper GPUs (grouped_gemm/kernel.cu), which can add weight
gradients to fp32 ones in place; torch's grouped GEMM on other GPUs; else one product for each
expert, which needs the row counts on the host. All take offsets on the device.

Shapes: N expert rows, El local experts, widths in, out, a, b.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_fluid.cuda.devices import has_grouped_gemm, is_hopper
from megatron_fluid.cuda.tensor_maps import GATED, Box, View, in_boxes, token_boxes
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.fixed_tiles.launch import FixedTiles, fixed_tile_matmul
from megatron_fluid.kernels.grouped_gemm.stacks import ReversedStack
from megatron_fluid.kernels.grouped_gemm.tiles import WIDE_DEPTH, wide_tiles_pay
from megatron_fluid.kernels.operands import refuse
from megatron_fluid.kernels.sm90.launch import Maps, Source, hopper_kernels

__all__ = [
    "GROUPED",
    "Owners",
    "add_weight_grads",
    "can_add_weight_grads",
    "can_gate",
    "can_send",
    "compile_ahead",
    "fixed_tiles",
    "gated_matmul",
    "grouped_matmul",
    "grouped_weight_grad",
    "groups_on_device",
    "host_ends",
    "layer_kernels",
    "prepare",
    "sends_rows",
    "sent_matmul",
    "takes_main_grads",
]

GROUPED = Source(
    files("megatron_fluid.kernels.grouped_gemm") / "kernel.cu",
    {
        "grouped_forward": "FORWARD",
        "grouped_backward": "BACKWARD",
        "sent_forward": "FORWARD,true",
        "sent_backward": "BACKWARD,true",
        "grouped_wide": "WIDE",
        "grouped_gated": "GATED",
        "grouped_weights": "WEIGHTS",
        "grouped_long_sums": "LONG_SUMS",
        "grouped_sums": "SUMS",
    },
    numbers=9,
)
_MOST_EXPERTS, _INT = 1024, 2**32 - 1  # of kernel.cu
# Mean rows of an expert from which LONG_SUMS pays where it adds; where it writes it always does.
# Measured: docs/tuning_notes.md#grouped-gemm
_LONG_ROWS = 896
_DTYPES = (torch.bfloat16, torch.float16)
_FORWARD, _BACKWARD = (128, 64), (64, 64)  # boxes in which weights are read; GATED is the third
_NAMES = {_FORWARD: "grouped_forward", _BACKWARD: "grouped_backward"}
_SENT = {_FORWARD: "sent_forward", _BACKWARD: "sent_backward"}


def _stack_of(weights: Tensor | Sequence[Tensor]) -> tuple[Tensor | None, int]:
    """The stack that weights are, or None; and 1, or -1 where they are its reverse."""
    if isinstance(weights, ReversedStack):
        return weights.stack, -1
    return (weights, 1) if isinstance(weights, Tensor) else (None, 1)


def grouped_matmul(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    offsets: Tensor,
    ends: Sequence[int] | None = None,
) -> Tensor:
    """Return x[rows of e] @ weights[e]: x [N, in], El times [in, out] -> [N, out].

    offsets: int32 [El] on the device; the rows of expert e end at offsets[e], and rows from
    offsets[-1] on are not written. weights: [El, in, out] of any strides, or El matrices; those,
    and what no grouped GEMM takes, need `ends`, the offsets on the host.

    Raises:
        ConfigError: widths or numbers of experts that do not match, offsets that are not int32.
    """
    stack, order = _stack_of(weights)
    experts, depth, width = (len(weights), *weights[0].shape) if stack is None else stack.shape
    _check(offsets, experts)
    rows = x.shape[0]
    if x.shape[1] != depth:
        raise ConfigError.of("width of expert rows", x.shape[1], f"{depth}, the weights'")
    if isinstance(weights, FixedTiles):
        return fixed_tile_matmul(x, weights.matrices, offsets, ends)
    if stack is not None:
        box = _box(stack)
        view = _weights_view(x, stack, box)
        if view is not None:
            out = x.new_empty(rows, width)
            maps = (view, token_boxes(x), (in_boxes(out, 64),))
            pointers = (out.data_ptr(), 0, offsets.data_ptr(), 0)
            sizes = (order * experts & _INT, rows, width, depth)
            _launch(_NAMES[box], x, maps, pointers, sizes)
            return out
        if order > 0 and _fits_torch(x, stack):
            return torch._grouped_mm(x, stack, offs=offsets)
    out = x.new_empty(rows, width)
    start = 0
    for expert, end in enumerate(host_ends(offsets, ends)):
        torch.mm(x[start:end], weights[expert], out=out[start:end])
        start = end
    return out


class Owners(NamedTuple):
    """Where each of N expert rows goes: row n to row origins[n] % 2 ** shift of the buffer of rank
    origins[n] >> shift.

    Attributes:
        origins: 32 bits, read as unsigned, of each row, and of rows that are not there anything.
            int32 [N] or longer
        buffers: the address of each rank's buffer [rows, out], on a 16-byte boundary. int64 [W], on
            the device
        shift: see above.
    """

    origins: Tensor
    buffers: Tensor
    shift: int


def can_send(x: Tensor, weights: Tensor | Sequence[Tensor]) -> bool:
    """Return whether sent_matmul takes these: 16-bit rows on Hopper, weights [El, in, out]."""
    if not isinstance(weights, Tensor) or weights.dim() != 3:
        return False
    return _weights_view(x, weights, _box(weights)) is not None


def sent_matmul(x: Tensor, weights: Tensor, offsets: Tensor, owners: Owners) -> None:
    """grouped_matmul(x, weights, offsets) with each row stored where `owners` says.

    x [N, in], weights [El, in, out]; `can_send` says whether it may be called. Rows travel while
    other tiles are multiplied. Other GPUs may read them once a flag that a later launch sets has
    reached them.

    Raises:
        ConfigError: widths or numbers of rows or experts that do not match, offsets or origins that
            are not int32.
    """
    experts, depth, width = weights.shape
    _check(offsets, experts)
    rows, origins = x.shape[0], owners.origins
    if x.shape[1] != depth or origins.dtype != torch.int32 or origins.shape[0] < rows:
        allowed = f"rows [{rows}, {depth}], an int32 origin for each"
        refuse("a sent product", allowed, rows=x, origins=origins)
    box = _box(weights)
    view = _weights_view(x, weights, box)
    assert view is not None, "can_send says whether this may be called"
    pointers = (0, owners.buffers.data_ptr(), offsets.data_ptr(), origins.data_ptr())
    sizes = (experts, rows, width, depth)
    _launch(_SENT[box], x, (view, token_boxes(x), ()), pointers, sizes, owners.shift)


def fixed_tiles(weights: Tensor | Sequence[Tensor]) -> Tensor | Sequence[Tensor]:
    """El matrices [in, out] as an operand of grouped_matmul that gives a row the same bits in any
    batch: what our kernels take as it is, since no tile changes the order of their sums; others as
    FixedTiles."""
    stack, _ = _stack_of(weights)
    if stack is not None and can_send(stack.new_empty(1, stack.shape[1]), stack):
        return weights
    return FixedTiles(weights)


def can_gate(x: Tensor, weights: Tensor | Sequence[Tensor], prob: Tensor, activation: str) -> bool:
    """Return whether gated_matmul takes these: swiglu, 16-bit rows on a Hopper GPU, fp32
    probabilities, weights [El, in, 2F] with `in` contiguous, F a multiple of 8."""
    stack, _ = _stack_of(weights)
    if activation != "swiglu" or stack is None or stack.dim() != 3 or stack.stride(1) != 1:
        return False
    fits = not stack.shape[2] & 15 and prob.dtype == torch.float32 and prob.is_contiguous()
    return fits and _weights_view(x, stack, GATED) is not None


def gated_matmul(
    x: Tensor,
    weights: Tensor | ReversedStack,
    offsets: Tensor,
    prob: Tensor,
    out: Tensor,
    keep: bool = True,
    ends: Sequence[int] | None = None,
) -> Tensor | None:
    """h = grouped_matmul(x, weights, offsets) and out = silu(h[:, :F]) * h[:, F:] * prob, in one
    launch; return h, or None without `keep`: then it is never written.

    x [N, in], weights [El, in, 2F], prob fp32 [N] or longer, out [N, F], h [N, 2F]. The values
    equal those of the kernels one after the other: h is rounded before it is used. `can_gate` says
    whether it may be called. ends: offsets on the host, exact or estimated; they decide whether
    larger tiles pay.

    Raises:
        ConfigError: widths or numbers of rows or experts that do not match, offsets that are not
            int32, an `out` that is not dense.
    """
    stack, order = _stack_of(weights)
    assert stack is not None, "can_gate says whether this may be called"
    experts, depth, width = stack.shape
    _check(offsets, experts)
    rows = x.shape[0]
    fits = x.shape[1] == depth and prob.dim() == 1 and prob.shape[0] >= rows
    fits = fits and out.shape == (rows, width // 2) and out.dtype == x.dtype
    if not fits or not out.is_contiguous() or out.data_ptr() & 15:
        allowed = (
            f"rows [{rows}, {depth}], a probability for each, dense out [{rows}, {width // 2}]"
        )
        refuse("a gated product", allowed, rows=x, probabilities=prob, out=out)
    h = x.new_empty(rows, width) if keep else None
    wide = ends is not None and wide_tiles_pay(ends, depth)
    box = 32 if wide else 64
    sides = (2, rows, width // 2), (width // 2, width, 1)
    halves = None if h is None else in_boxes(h.as_strided(*sides), box, 32)
    view = _weights_view(x, stack, GATED)
    assert view is not None, "can_gate says whether this may be called"
    maps = (view, token_boxes(x), (halves, in_boxes(out, box, 32)))
    kept = 0 if h is None else h.data_ptr()
    pointers = (kept, out.data_ptr(), offsets.data_ptr(), prob.data_ptr())
    name = "grouped_wide" if wide else "grouped_gated"
    _launch(name, x, maps, pointers, (order * experts & _INT, rows, width, depth), keep)
    return h


def grouped_weight_grad(
    left: Tensor, right: Tensor, offsets: Tensor, ends: Sequence[int] | None = None
) -> Tensor:
    """Return left[rows of e].T @ right[rows of e]: [N, a], [N, b] -> [El, a, b], 0 without rows.

    Raises:
        ConfigError: different numbers of rows, offsets that are not int32.
    """
    _check(offsets, offsets.shape[0], left, right)
    if _rows_fit(left, right) and offsets.shape[0] <= _MOST_EXPERTS:
        out = left.new_empty(offsets.shape[0], left.shape[1], right.shape[1])
        maps = (in_boxes(left, 64), in_boxes(right, 64), (in_boxes(out, 64),))
        pointers = (out.data_ptr(), 0, offsets.data_ptr(), 0)
        _launch("grouped_weights", left, maps, pointers, (*out.shape, left.shape[0]))
        return out
    if _fits_torch(left, right):
        return torch._grouped_mm(left.t(), right, offs=offsets)
    out = left.new_empty(offsets.shape[0], left.shape[1], right.shape[1])
    start = 0
    for expert, end in enumerate(host_ends(offsets, ends)):
        torch.mm(left[start:end].t(), right[start:end], out=out[expert])
        start = end
    return out


def can_add_weight_grads(left: Tensor, right: Tensor) -> bool:
    """Return whether add_weight_grads takes these rows: 16-bit ones on a Hopper GPU."""
    return _rows_fit(left, right)


def takes_main_grads(outputs: Sequence[Tensor]) -> bool:
    """Return whether add_weight_grads takes these outputs: dense fp32 matrices on 16-byte
    boundaries."""
    if len(outputs) > _MOST_EXPERTS:
        return False
    fp32 = torch.float32
    return all(t.dtype == fp32 and t.is_contiguous() and not t.data_ptr() & 15 for t in outputs)


def add_weight_grads(
    left: Tensor,
    right: Tensor,
    offsets: Tensor,
    addresses: Tensor,
    outputs: Tensor | Sequence[Tensor],
    overwrite: bool = False,
) -> None:
    """outputs[e] += left[rows of e].T @ right[rows of e]: [N, a], [N, b], El fp32 matrices [a, b].

    addresses: int64 [El] on the device, where the outputs begin. overwrite: outputs[e] = instead of
    +=, zero for an expert without rows. Where sums are added, old ones, products and results below
    2**-126 count as zero. Streams must order calls for the same outputs. `can_add_weight_grads` and
    `takes_main_grads` say whether it takes the arguments.

    Raises:
        ConfigError: different numbers of rows or of experts, outputs of another shape or device,
            offsets that are not int32.
    """
    _check(offsets, len(outputs), left, right)
    shape = (left.shape[1], right.shape[1])
    if addresses.shape[0] != len(outputs) or outputs[0].shape != shape:
        found = f"{addresses.shape[0]} addresses, {tuple(outputs[0].shape)}"
        raise ConfigError.of("outputs", found, f"{len(outputs)} of {shape}")
    if addresses.device != left.device:
        raise ConfigError.of("outputs", str(addresses.device), f"on {left.device}")
    pointers = (0, 0, offsets.data_ptr(), addresses.data_ptr())
    sizes = (len(outputs), left.shape[1], right.shape[1], left.shape[0])
    maps = (in_boxes(left, 64), in_boxes(right, 64), ())  # the sums are not written by TMA
    long = overwrite or left.shape[0] >= _LONG_ROWS * len(outputs)
    name = "grouped_long_sums" if long else "grouped_sums"
    _launch(name, left, maps, pointers, sizes, overwrite)


def layer_kernels(hidden: int, activation: str, sends: bool) -> tuple[str, ...]:
    """Return the names of our kernels that experts with tokens [T, hidden] may use. sends: over
    NVLink, where sent_matmul is among them."""
    names = [*_NAMES.values(), *(_SENT.values() if sends else ())]
    if activation == "swiglu":
        names += ["grouped_wide", "grouped_gated"] if hidden >= WIDE_DEPTH else ["grouped_gated"]
    return (*names, "grouped_weights", "grouped_long_sums", "grouped_sums")


def compile_ahead(
    device: torch.device, dtype: torch.dtype, hidden: int, activation: str, sends: bool
) -> None:
    """Begin to compile layer_kernels in the background if `device` runs them."""
    index = device.index
    if device.type == "cuda" and index is None and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
    if index is not None and sends_rows(torch.device(device.type, index), dtype):
        GROUPED.compile_ahead(layer_kernels(hidden, activation, sends), dtype)


def prepare(device: torch.device, dtype: torch.dtype, hidden: int, activation: str) -> None:
    """Compile and load layer_kernels, those that send included, if `device` runs them. Without it
    the first forward compiles for seconds while its peers wait."""
    if sends_rows(device, dtype):
        names = layer_kernels(hidden, activation, sends=True)
        hopper_kernels(GROUPED, dtype, device.index).prepare(names)


def sends_rows(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `device` runs these kernels for `dtype`; they can send the rows they compute."""
    return device.type == "cuda" and dtype in _DTYPES and is_hopper(device.index)


def groups_on_device(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether stacked weights are multiplied in one launch, without row counts on the host: by
    these kernels or by torch's."""
    torchs = device.type == "cuda" and dtype == torch.bfloat16 and has_grouped_gemm(device.index)
    return torchs or sends_rows(device, dtype)


def host_ends(offsets: Tensor, ends: Sequence[int] | None) -> Sequence[int]:
    """Return where each expert's rows end. Without `ends` (bounded mode) they are read from the
    device.

    Raises:
        ConfigError: during a CUDA-graph capture, which forbids that.
    """
    if ends is not None:
        return ends
    if offsets.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            "these expert weights cannot be captured in a CUDA graph: on a Hopper GPU, stack them "
            "in bf16 with widths divisible by 8, and keep main_grad contiguous, fp32 and 16-byte "
            "aligned"
        )
    return offsets.tolist()


def _check(
    offsets: Tensor, experts: int, left: Tensor | None = None, right: Tensor | None = None
) -> None:
    if offsets.dtype != torch.int32 or offsets.shape[0] != experts:
        found = f"{offsets.dtype} {list(offsets.shape)}"
        raise ConfigError.of("offsets", found, f"torch.int32 [{experts}]")
    if left is not None and right is not None and left.shape[0] != right.shape[0]:
        raise ConfigError(f"left has {left.shape[0]} rows and right {right.shape[0]}")


def _launch(
    name: str,
    x: Tensor,
    maps: Maps,
    pointers: tuple[int, int, int, int],
    sizes: tuple[int, int, int, int],
    keep: int = True,
) -> None:
    """Start kernel `name`. pointers: out, act, ends and extra of its parameters."""
    kernels = hopper_kernels(GROUPED, x.dtype, x.device.index)
    kernels.launch(name, maps, (*pointers, *sizes, keep))


def _box(weights: Tensor) -> Box:
    """By which weights [El, in, out] are read, as they lie: in a forward `in` is contiguous."""
    return _FORWARD if weights.stride(1) == 1 else _BACKWARD


def _weights_view(x: Tensor, weights: Tensor, box: Box) -> View | None:
    """Return the view of a parameter [El, in, out] that our kernels read, or None if they do not
    take the product of rows x and it. box: _FORWARD, _BACKWARD or GATED."""
    address, dtype = weights.data_ptr(), weights.dtype
    if not _rows_fit(x) or dtype != x.dtype or address & 15:
        return None
    lies = _lies(weights.shape, weights.stride(), box)
    return None if lies is None else (address, dtype, *lies, (box,))


@functools.lru_cache(maxsize=1024)
def _lies(
    shape: tuple[int, ...], strides: tuple[int, ...], box: Box
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of weights [El, in, out] as they lie in memory, or None if our kernels do
    not take them."""
    if box != _BACKWARD:
        (experts, depth, width), (plane, step, row) = shape, strides
    else:
        (experts, width, depth), (plane, row, step) = shape, strides
    if step != 1 or (depth | width | row | plane) & 7 or experts > _MOST_EXPERTS:
        return None
    return ((experts, width, depth), (plane, row, 1)) if experts * depth * width else None


def _rows_fit(x: Tensor, other: Tensor | None = None) -> bool:
    """Whether our kernels take rows x, and with them rows `other`: 16-bit floats on a Hopper GPU,
    something to do, dense rows on 16-byte boundaries."""
    if x.dtype not in _DTYPES or not x.is_cuda or not is_hopper(x.device.index):
        return False
    return _dense(x) and (other is None or (other.dtype == x.dtype and _dense(other)))


def _dense(t: Tensor) -> bool:
    strides, width = t.stride(), t.shape[-1]
    if strides[-1] != 1 or (t.data_ptr() & 15) | (width & 7) | (strides[-2] & 7):
        return False
    return t.numel() > 0 and (len(strides) == 2 or not strides[0] & 7)


def _fits_torch(x: Tensor, other: Tensor) -> bool:
    """Whether torch's grouped GEMM takes these: bf16 on a GPU of compute capability 9.0 or later
    (below, torch goes expert by expert itself), 16-byte rows, at least one row."""
    if not x.is_cuda or not x.dtype == other.dtype == torch.bfloat16 or not x.shape[0]:
        return False
    return has_grouped_gemm(x.device.index) and all(
        not t.data_ptr() & 15
        and not t.shape[-1] & 7
        and all(not s & 7 or s == 1 for s in t.stride())
        for t in (x, other)
    )
