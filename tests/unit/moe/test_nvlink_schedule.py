"""When the NVLink path streams its dispatch and lets GEMMs send rows."""

from __future__ import annotations

import functools

from megatron_fluid.moe.nvlink import schedule as nvlink_schedule
from megatron_fluid.moe.nvlink.schedule import NO_OVERLAP, choose_schedule


def test_a_dispatch_is_streamed_where_the_wire_takes_longer_than_moving_tokens() -> None:
    olmoe, deepseek, mixtral = (
        (4096, 2048, 1024, 8, 64),
        (4096, 7168, 2048, 8, 256),
        (4096, 4096, 14336, 2, 8),
    )
    choose_schedule = functools.partial(nvlink_schedule.choose_schedule, sends=False)
    assert choose_schedule(*olmoe, ranks=4).stream and choose_schedule(*mixtral, ranks=4).stream
    assert not choose_schedule(1024, *olmoe[1:], ranks=4).stream, "little is sent"
    assert not choose_schedule(*deepseek, ranks=2).stream, (
        "moving the tokens takes as long as the wire"
    )
    assert choose_schedule(*deepseek, ranks=4).stream
    assert choose_schedule(*olmoe, ranks=1) == choose_schedule(0, *olmoe[1:], ranks=2) == NO_OVERLAP


def test_rows_are_sent_by_gemms_where_the_wire_is_not_slower_than_sums_and_what_they_wait_for() -> (
    None
):
    deepseek, mixtral, qwen3 = (
        (4096, 7168, 2048, 8, 256),
        (4096, 4096, 14336, 2, 8),
        (4096, 2048, 768, 8, 128),
    )
    for shape in (deepseek, mixtral, qwen3):
        for ranks in (2, 4, 8):
            assert choose_schedule(*shape, ranks, True).sent_rows
            assert not choose_schedule(*shape, ranks, False).sent_rows, "these GEMMs cannot"
    assert choose_schedule(*mixtral, 1, True) == NO_OVERLAP, "nothing has a way"
    assert choose_schedule(4096, 4096, 512, 8, 8, 4, True).sent_rows, (
        "every token has all experts, so goes to every rank"
    )
    assert choose_schedule(0, 64, 32, 9, 8, 2, True) == NO_OVERLAP, "and more choices than experts"
    assert not choose_schedule(4096, 2048, 96, 64, 128, 2, True).sent_rows, (
        "64 rows a token, where one sum would do"
    )
