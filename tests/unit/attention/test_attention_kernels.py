"""The choice of the core attention's kernel, the mask of a window, and the kernels that rotate and
pack queries, keys and values, against torch's operations."""

import pytest
import torch

from megatron_fluid.attention import attention_kernels, packed
from megatron_fluid.attention.attention_kernels import (
    CoreCase,
    choose_kernel,
    run_sdpa,
    run_te,
    window_mask,
)
from megatron_fluid.attention.layouts import HeadLayout
from megatron_fluid.attention.packed import (
    Norm,
    Rotary,
    pack_backward,
    pack_gradients,
    pack_in_one_pass,
    split,
)
from megatron_fluid.errors import ConfigError
from megatron_fluid.kernels.head_exchange.rotary import rotate_heads
from tests.support.machine import NEEDS_INTERPRETER


def test_a_query_sees_a_window_of_keys() -> None:
    seen = window_mask(5, 2, True, torch.device("cpu"))
    pairs = [[query, key] for query in range(5) for key in range(max(query - 1, 0), query + 1)]
    assert seen.nonzero().tolist() == pairs
    assert window_mask(4, 2, False, torch.device("cpu")).sum() == 10


def test_the_kernel_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CoreCase(8, torch.float32, "cpu")
    assert choose_kernel("auto", case) is run_sdpa
    assert choose_kernel("auto", CoreCase(8, torch.float32, "cpu", window=3)) is run_sdpa
    with pytest.raises(ConfigError, match=r"te.*CUDA"):
        choose_kernel("te", case)
    with pytest.raises(ConfigError, match=r"te.*float32"):
        choose_kernel("te", CoreCase(8, torch.float32, "cuda"))
    with pytest.raises(ConfigError, match="attention_kernel.*auto, sdpa, te"):
        choose_kernel("fast", case)
    monkeypatch.setattr(attention_kernels, "_te_import_problem", lambda: None)  # as if installed
    windowed = CoreCase(256, torch.bfloat16, "cuda", window=8)
    assert choose_kernel("auto", windowed) is choose_kernel("te", windowed) is run_te
    assert choose_kernel("auto", CoreCase(256, torch.bfloat16, "cuda")) is run_sdpa


# ---- rotating and packing, by kernels and by torch


@NEEDS_INTERPRETER
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("rotary", "dim", "above"),
    [(Rotary(8), 8, 0), (Rotary(4, 500.0, True), 8, 0), (Rotary(6), 10, 0), (Rotary(8), 8, 3)],
)
def test_rotating_by_the_kernel_is_rotating(
    rotary: Rotary, dim: int, above: int, inverse: bool, apart: bool
) -> None:
    """Heads of a wider buffer, whose rows are ``above`` elements longer than whole heads."""
    length, batch, heads = 7, 2, 5
    table = rotary.table(length, torch.device("cpu"), torch.float64)
    buffer = torch.randn(length, batch, 6 * dim + above, dtype=torch.float64)
    source = buffer[..., : heads * dim].unflatten(2, (heads, dim))
    target = torch.full_like(source, 7.0) if apart else source
    expected = source.clone()
    packed._turn(source, expected, table, inverse)
    whole = buffer.clone()
    rotate_heads(source, target, table.cos, table.sin, rotary.interleaved, inverse)
    torch.testing.assert_close(target, expected, rtol=1e-14, atol=1e-14)
    untouched = slice(0, None) if apart else slice(heads * dim, None)
    assert torch.equal(buffer[..., untouched], whole[..., untouched])


@NEEDS_INTERPRETER
@pytest.mark.parametrize("rotary", [None, Rotary(8), Rotary(4, 500.0, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(8, 4, 2), (12, 2, 4)])
def test_packing_in_one_pass_is_packing(
    rotary: Rotary | None, heads: int, kv_heads: int, world: int
) -> None:
    length, batch = 21, 2
    part = HeadLayout(heads, kv_heads, 8, world).part(1)
    table = None if rotary is None else rotary.table(length, torch.device("cpu"), torch.float64)
    q, k, v = split(torch.randn(length, batch, part.width, dtype=torch.float64), part)
    copied = torch.randn(*v.shape[:3], 9, dtype=torch.float64)[..., :8]
    gradients = (torch.randn_like(q), k, copied)
    expected, found, apart, normed, raw = (
        torch.full((length, batch, part.width), 7.0, dtype=torch.float64) for _ in range(5)
    )
    pack_gradients(gradients, part, table, expected)
    assert pack_backward(gradients, part, table, found) is None
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)
    found.fill_(7.0)
    assert pack_in_one_pass(gradients, part, table, found) is None
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)
    q, k, v = (g.reshape(length, batch, -1, 8) for g in gradients)
    pack_in_one_pass((q, k, v), part, table, apart, apart=True)
    torch.testing.assert_close(apart, expected, rtol=1e-14, atol=1e-14)

    raw.normal_()
    norm = Norm(torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64), 1e-3)
    by_kernel = pack_in_one_pass(gradients, part, table, normed, norm, raw)
    by_torch = pack_backward(gradients, part, table, found, norm, raw)
    assert by_kernel is not None and by_torch is not None
    torch.testing.assert_close((normed, *by_kernel), (found, *by_torch), rtol=1e-12, atol=1e-12)
