"""Which measured shape speaks for another."""

from __future__ import annotations

from megatron_fluid.tensor_parallel.measured import nearest_backend


def test_a_measured_shape_speaks_for_its_neighbours() -> None:
    table = [
        ("H200", 4, "gather", 1024, 512, 512, "fused"),
        ("H200", 4, "gather", 4096, 512, 512, "copy_engine"),
        ("H200", 8, "gather", 1024, 512, 512, "collective"),
    ]
    found = {
        m: nearest_backend(table, "H200", 4, "gather", (m, 512, 512))
        for m in (256, 512, 1024, 1500, 3000, 8192, 8193)
    }
    assert found == {
        256: None,
        512: "fused",
        1024: "fused",
        1500: "fused",
        3000: "copy_engine",
        8192: "copy_engine",
        8193: None,
    }
    assert nearest_backend(table, "H200", 4, "scatter", (1024, 512, 512)) is None
    assert nearest_backend(table, "A100", 4, "gather", (1024, 512, 512)) is None
    assert nearest_backend(table, "H200", 4, "gather", (1024, 512, 2048)) is None
    # Both are twice as short, one of them alike in N and K.
    table = [
        ("H200", 4, "scatter", 8192, 4096, 1024, "fused"),
        ("H200", 4, "scatter", 8192, 8192, 2048, "copy_engine"),
    ]
    assert nearest_backend(table, "H200", 4, "scatter", (16384, 8192, 2048)) == "copy_engine"
