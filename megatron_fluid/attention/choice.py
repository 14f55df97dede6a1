"""Where `auto` on GPUs keeps projections around the exchange of heads and sequence instead of
overlapping them with it. Reasons and figures: docs/tuning_notes.md#attention."""

from __future__ import annotations

__all__ = ["gather_slower_reason", "overlap_slower_reason"]

_REMEDY = "--fluid-cp-backend nvlink overlaps all the same"


def overlap_slower_reason(shards: int) -> str | None:
    """Return why self-attention is faster with its projections around the exchange, or None.

    Args:
        shards: tensor-parallel ranks that hold the rows of the sequence in parts, between linears
            that overlap the gathers and scatters of these rows with their GEMMs; 1: none.
    """
    if shards == 1:
        return None
    return f"auto: under sequence parallelism the linears overlap their own gathers ({_REMEDY})"


def gather_slower_reason(compressed: int, exchanged: int) -> str | None:
    """Return why latent attention is faster where heads are exchanged than where compressed rows
    are gathered and projected to a rank's heads, or None.

    A gather passes behind its projection, an exchange of heads does not: it may move up to twice
    the bytes.

    Args:
        compressed: columns of the rows that are gathered, for queries, keys and values.
        exchanged: columns of queries, keys and values of the heads of one rank.
    """
    if compressed < 2 * exchanged:
        return None
    return (
        f"auto: compressed rows have {compressed} columns, the heads of a rank {exchanged} "
        f"({_REMEDY})"
    )
