"""The tokens of text files: bytes."""

from __future__ import annotations

from typing import Any

import numpy

__all__ = ["ByteTokenizer"]


class ByteTokenizer:
    """Every byte is a token (0 to 255) and 256 ends a document: no vocabulary, any encoding, any
    language."""

    vocab_size = 257
    eod = 256

    def encode(self, piece: bytes, source: str) -> numpy.ndarray:
        """The ids of ``piece`` (1-D), without the end of the document; ``source`` names it in
        errors."""
        return numpy.frombuffer(piece, dtype=numpy.uint8)

    def identity(self) -> dict[str, Any]:
        """What a dataset's record says of its tokens."""
        return {"tokenizer": "bytes"}
