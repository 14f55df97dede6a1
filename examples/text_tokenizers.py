"""Tokenizers for text files: bytes, or any text tokenizer of Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy

__all__ = ["ByteTokenizer", "MegatronTextTokenizer", "TextTokenizer"]


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


class MegatronTextTokenizer:
    """Any text tokenizer of Megatron-Core (HuggingFace folder, SentencePiece, ...) as a
    :class:`TextTokenizer`.

    Args:
        tokenizer: what ``megatron.core.tokenizers.utils.build_tokenizer`` returns.
        model: its file or folder; the sizes and modification times of what lies there go into the
            cache key.

    Raises:
        ValueError: the tokenizer has no end-of-document token.
    """

    def __init__(self, tokenizer: Any, model: str | None) -> None:
        eod = tokenizer.eod
        if not isinstance(eod, int) or eod < 0:
            raise ValueError(
                f"the tokenizer {model or type(tokenizer).__name__} has no end-of-text token "
                f"(found {eod!r}); "
                "set eos_token in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._model = model
        self.eod = eod
        self.vocab_size = int(tokenizer.vocab_size)

    def encode(self, piece: bytes, source: str) -> numpy.ndarray:
        try:
            text = piece.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{source} is not UTF-8 text (byte {error.start} of this piece): convert it, leave "
                "it out, "
                "or use the byte-level tokenizer, which takes any bytes"
            ) from None
        return numpy.asarray(self._tokenizer.tokenize(text), dtype=numpy.int64)

    def identity(self) -> dict[str, Any]:
        files: list[tuple[str, int, int]] = []
        if self._model is not None and Path(self._model).exists():
            root = Path(self._model)
            found = (
                [root]
                if root.is_file()
                else sorted(path for path in root.rglob("*") if path.is_file())
            )
            files = [
                (str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns)
                for path in found
            ]
        return {
            "tokenizer": type(self._tokenizer).__name__,
            "vocab_size": self.vocab_size,
            "files": files,
        }
