"""The tokens of text files: bytes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy

__all__ = ["ByteTokenizer", "TextTokenizer"]


class TextTokenizer(Protocol):
    """What the builder needs: ids of a piece of text, the id that ends a document, and a name for
    the cache key."""

    vocab_size: int
    eod: int

    def encode(self, piece: bytes, source: str) -> numpy.ndarray:
        """The token ids (1-D, integers) of ``piece``, without the end of document; ``source`` names
        it in errors."""
        ...

    def identity(self) -> dict[str, Any]:
        """What must be equal for two tokenizers to give the same ids; JSON-serialisable."""
        ...


class ByteTokenizer:
    """Every byte is a token (0 to 255) and 256 ends a document: no vocabulary, any encoding, any
    language."""

    vocab_size = 257
    eod = 256

    def encode(self, piece: bytes, source: str) -> numpy.ndarray:
        return numpy.frombuffer(piece, dtype=numpy.uint8)

    def identity(self) -> dict[str, Any]:
        return {"tokenizer": "bytes"}
