"""Which measured shape speaks for another."""

from __future__ import annotations

from megatron_fluid.tensor_parallel.measured import nearest_backend

TABLE = [
    ("H200", 4, "gather", 1024, 512, 512, "fused"),
    ("H200", 4, "gather", 4096, 512, 512, "copy_engine"),
    ("H200", 8, "gather", 1024, 512, 512, "collective"),
    ("H200", 4, "scatter", 8192, 4096, 1024, "fused"),
    ("H200", 4, "scatter", 8192, 8192, 2048, "copy_engine"),
]


def _backend(m: int, n: int = 512, k: int = 512, gpu: str = "H200", ranks: int = 4) -> str:
    return nearest_backend(TABLE, gpu, ranks, "gather", (m, n, k))


def test_a_measured_shape_speaks_for_its_neighbours_and_for_larger_ones() -> None:
    found = {m: _backend(m) for m in (512, 1024, 1500, 3000, 8192, 100_000)}
    assert found == {
        512: "fused",
        1024: "fused",
        1500: "fused",
        3000: "copy_engine",
        8192: "copy_engine",
        100_000: "copy_engine",
    }
    assert _backend(1024, k=2048) == "fused"
    # Both are half as long; one is alike in N and K.
    scatter = nearest_backend(TABLE, "H200", 4, "scatter", (16384, 8192, 2048))
    assert scatter == "copy_engine"


def test_what_is_smaller_than_half_of_any_measured_shape_is_left_to_the_collective() -> None:
    assert _backend(256) == _backend(1024, n=128) == _backend(0) == "collective"


def test_another_gpu_and_another_number_of_ranks_take_the_nearest_entries() -> None:
    assert _backend(1024, gpu="A100") == _backend(1024, ranks=2) == "fused"
    assert _backend(1024, ranks=16) == "collective"
