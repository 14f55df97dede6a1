"""A tensor- and sequence-parallel linear by hand: every rank's shards together in float64, through
torch's own autograd."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor


def whole_linear(
    mode: str, group: dist.ProcessGroup, tensors: dict[str, Tensor], upstream: Tensor,
    norm: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """This rank's output ("out") and gradients (by the names in `tensors`). `mode`:

    column: x ``[S / W, B, K]``, weight ``[N / W, K]``, bias ``[N / W]``, output ``[S, B, N / W]``;
    row: x ``[S, B, K / W]``, weight ``[N, K / W]``, bias ``[N]``, output ``[S / W, B, N]``.

    `tensors`: x, weight, and bias, gamma, beta if any. What all ranks hold has the gradient of this
    rank's rows, as in Megatron. `upstream`: the output's; `norm` takes x, gamma, beta.
    """
    leaves = {
        name: [part.double().requires_grad_() for part in _every_rank(tensor, group)]
        for name, tensor in tensors.items()
    }
    none = [None] * group.size()
    x, weight, bias = leaves["x"], leaves["weight"], leaves.get("bias")
    rows = x
    if norm is not None:
        norms = zip(x, leaves["gamma"], leaves.get("beta", none), strict=True)
        rows = [norm(*own) for own in norms]
    if mode == "column":
        whole = torch.cat(rows) @ torch.cat(weight).t()
        outputs = (whole if bias is None else whole + torch.cat(bias)).chunk(group.size(), -1)
    else:
        parts = (torch.cat(rows, -1) @ torch.cat(weight, 1).t()).chunk(group.size())
        outputs = parts
        if bias is not None:
            outputs = tuple(part + b for part, b in zip(parts, bias, strict=True))
    torch.autograd.backward(outputs, [given.double() for given in _every_rank(upstream, group)])
    found = {"out": outputs[group.rank()].detach()}
    for name, parts_of in leaves.items():
        gradient = parts_of[group.rank()].grad
        assert gradient is not None, name
        found[name] = gradient
    return found


def _every_rank(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    own = tensor.detach().contiguous()
    parts = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(parts, own, group=group)
    return parts
