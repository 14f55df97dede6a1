"""A few tokens in several batches: their outputs, bit for bit."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TOKENS = 3
# Other tokens before and behind; ranks have different numbers of them.
_BATCHES = ((0, 0), (5, 0), (1, 26), (18, 9))
_WORDS = {2: torch.int16, 4: torch.int32}


def bits_in_batches(
    layer: Callable[[Tensor], Tensor], rank: int, hidden: int, dtype: torch.dtype,
    device: torch.device | str = "cpu", scale: int = 1,
) -> Tensor:  # fmt: skip
    """The same tokens beside others in several batches, and at last one by one, as bits of the
    output [batches, TOKENS, H]. Collective if the layer is. scale: of the others' numbers."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randn(TOKENS, hidden, generator=generator).to(device, dtype)
    found = []
    for batch, (before, behind) in enumerate(_BATCHES):
        generator.manual_seed(100 * batch + rank)
        count = before * scale + rank, behind * scale + 2 * rank
        first, last = (torch.randn(n, hidden, generator=generator).to(tokens) for n in count)
        with torch.no_grad():
            found.append(layer(torch.cat([first, tokens, last]))[count[0] :][:TOKENS])
    with torch.no_grad():
        found.append(torch.cat([layer(token) for token in tokens.split(1)]))
    return torch.stack(found).view(_WORDS[dtype.itemsize]).cpu()


def tokens_seen(found: Sequence[Tensor]) -> int:
    """How many different outputs the tokens had, at most, over all batches."""
    every = torch.cat(list(found))
    return max(len(every[:, token].unique(dim=0)) for token in range(TOKENS))
