"""Text files -> Megatron's indexed dataset (``.bin`` / ``.idx``), tokenised once and kept.

A corpus is a list of files and folders. Every file is cut into pieces (documents), every piece goes
as a whole to the train, the valid or the test split, and each split becomes one indexed dataset, so
that what is held out was never trained on. The result lies in ``<cache folder>/<key>``, where the
key hashes everything that shapes it: the files' paths, sizes and modification times, and the split
weights. A second run finds it there and reads nothing.

Several processes may ask for the same corpus at once: the first to take the file lock builds in a
private folder and renames it into place, the others wait for that, bounded by a timeout. A builder
that dies releases its lock, so the next process tries itself and meets the same error: nobody waits
for a message that will never come.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from text_cache import only_builder, read_record, write_record
from text_files import cut_text, find_text_files, standard_library_files
from text_tokenizers import ByteTokenizer
from tqdm import tqdm

__all__ = [
    "SPLITS",
    "ByteTokenizer",
    "TextDataset",
    "build_text_dataset",
    "cut_text",
    "find_text_files",
    "parse_split",
    "standard_library_files",
]

SPLITS = ("train", "valid", "test")
# Raise it when the builder's output changes: caches of the old format are then not read.
_FORMAT = 4
_MIN_PIECE, _MAX_PIECE, _PIECES = 1 << 6, 1 << 20, 256
_SNIFF = 8192


@dataclass(frozen=True)
class TextDataset:
    """One tokenised corpus on disk.

    ``prefixes`` maps a split to the path prefix that Megatron's ``--train-data-path`` and its like
    take (None: the split is empty by request); ``tokens`` and ``bytes`` count what each split
    holds, documents' ends included in tokens.
    """

    folder: str
    prefixes: dict[str, str | None]
    tokens: dict[str, int]
    bytes: dict[str, int]
    documents: dict[str, int]
    files: int
    skipped: list[str]
    tokenizer: dict[str, Any]

    def require_length(self, seq_length: int) -> None:
        """Refuse a corpus that cannot fill one sequence.

        Raises:
            ValueError: a split in use has fewer than ``seq_length + 1`` tokens.
        """
        for split in SPLITS:
            if self.prefixes[split] is not None and self.tokens[split] < seq_length + 1:
                raise ValueError(
                    f"--seq-length {seq_length} needs at least {seq_length + 1} tokens in every "
                    f"split, but the {split} "
                    f"split of this text has {self.tokens[split]}: give more text, a shorter "
                    "sequence, or another --split"
                )


def parse_split(text: str) -> tuple[float, float, float]:
    """Megatron's ``--split`` ("95,5,0": weights of train, valid, test) as fractions that sum to
    one.

    Raises:
        ValueError: not one to three non-negative numbers, or a train weight of zero.
    """
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        weights = []
    total = sum(weights)
    finite = math.isfinite(total)
    if not (finite and 1 <= len(weights) <= len(SPLITS) and min(weights) >= 0 and weights[0]):
        raise ValueError(
            f"--split: found {text!r}, allowed are weights of train, valid and test such as "
            '"95,5,0"'
        )
    weights += [0.0] * (len(SPLITS) - len(weights))
    return (weights[0] / total, weights[1] / total, weights[2] / total)


def build_text_dataset(
    files: Sequence[Path],
    tokenizer: ByteTokenizer,
    split: tuple[float, float, float],
    cache_folder: str | os.PathLike[str],
    wait_s: float = 3600.0,
) -> TextDataset:
    """The indexed datasets of ``files``: from the cache, or built by this process, or awaited from
    another that builds.

    Args:
        files: from :func:`find_text_files` or :func:`standard_library_files`.
        tokenizer: turns pieces into ids.
        split: fractions of train, valid and test by bytes; a fraction of zero gives no dataset.
        cache_folder: created where missing.
        wait_s: how long to wait for another process that builds the same corpus.

    Raises:
        ValueError: no text in the files, too little for the split, text that the tokenizer cannot
            read, or a cache that is damaged, locked by a link or not writable.
        TimeoutError: another process has been building for more than ``wait_s`` seconds.
    """
    key = _cache_key(files, split)
    root = Path(cache_folder).expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--text-cache {root}: this folder cannot be created ({error.strerror})"
        ) from None
    folder = root / key
    if (done := _read(folder)) is not None:
        return done
    with only_builder(root / f"{key}.lock", wait_s):
        if (
            done := _read(folder)
        ) is not None:  # somebody else finished it while this process waited
            return done
        host = socket.gethostname()
        for stale in root.glob(f"{key}.partial.{host}.*"):  # we hold the lock: its writer is dead
            shutil.rmtree(stale, ignore_errors=True)
        partial = root / f"{key}.partial.{host}.{os.getpid()}"
        try:
            partial.mkdir()
            summary = _tokenise(files, tokenizer, split, partial)
            write_record(partial, summary)
            try:
                partial.rename(folder)
            except OSError:
                if (
                    _read(folder) is None
                ):  # a node that does not see our lock may have been faster: same content
                    raise
        except OSError as error:
            raise ValueError(
                f"--text-cache {root}: this folder cannot be written ({error.strerror}), and this "
                "text is not in it yet; name another folder with --text-cache"
            ) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    done = _read(folder)
    assert done is not None
    return done


def _cache_key(files: Sequence[Path], split: tuple[float, float, float]) -> str:
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    parts = {"format": _FORMAT, "files": stats, "split": split}
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _read(folder: Path) -> TextDataset | None:
    """The finished dataset in ``folder``, or None; a ValueError where it is damaged."""
    summary = read_record(folder)
    if summary is None:
        return None
    prefixes = {name: str(folder / name) if summary["tokens"][name] else None for name in SPLITS}
    return TextDataset(folder=str(folder), prefixes=prefixes, **summary)


class _SplitByPosition:
    """The split of a piece from the corpus position at which it starts: a piece's length has no say
    in its fate.

    The corpus is a row of equal periods, each shared out among the splits in the order train,
    valid, test. A period is so long that the smallest share is as long as the longest piece, hence
    at least one piece starts in it.
    """

    def __init__(self, split: tuple[float, float, float], longest_piece: int, total: int) -> None:
        self._period = min(longest_piece / min(weight for weight in split if weight), float(total))
        self._ends = [sum(split[: index + 1]) for index in range(len(SPLITS))]
        self._used = [index for index, weight in enumerate(split) if weight]

    def __call__(self, position: int) -> str:
        phase = position % self._period / self._period
        return SPLITS[
            next((index for index in self._used if phase < self._ends[index]), self._used[-1])
        ]


def _tokenise(
    files: Sequence[Path], tokenizer: ByteTokenizer, split: tuple[float, float, float], folder: Path
) -> dict[str, Any]:
    """Write ``<split>.bin`` and ``<split>.idx`` into ``folder``; returns the counts of
    :class:`TextDataset`."""
    sizes = {path: path.stat().st_size for path in files}
    total = sum(sizes.values())
    limit = min(max(total // _PIECES, _MIN_PIECE), _MAX_PIECE)
    choose = _SplitByPosition(split, limit, total)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    builders = {
        name: IndexedDatasetBuilder(get_bin_path(str(folder / name)), dtype=dtype)
        for name, weight in zip(SPLITS, split, strict=True)
        if weight
    }
    tokens = dict.fromkeys(SPLITS, 0)
    written = dict.fromkeys(SPLITS, 0)
    documents = dict.fromkeys(SPLITS, 0)
    skipped: list[str] = []
    seen = 0
    with tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="tokenising text",
        mininterval=0.5,
        file=sys.__stderr__,
    ) as progress:
        for path in random.Random(0).sample(
            list(files), len(files)
        ):  # neighbours by name are alike: mix them
            try:
                data = path.read_bytes()
            except OSError as error:
                raise ValueError(f"--text-path: {path} cannot be read ({error.strerror})") from None
            progress.update(len(data))
            if b"\0" in data[:_SNIFF]:
                skipped.append(str(path))
                continue
            for part, piece in enumerate(cut_text(data, limit)):
                ids = tokenizer.encode(piece, f"{path} (piece {part})")
                name = choose(seen)
                seen += len(piece)
                builders[name].add_document(
                    numpy.append(ids, tokenizer.eod).astype(dtype), [len(ids) + 1]
                )
                tokens[name] += len(ids) + 1
                written[name] += len(piece)
                documents[name] += 1
    if not seen:
        what = f"{len(files)} file(s)" + (f", {len(skipped)} of them binary" if skipped else "")
        raise ValueError(f"--text-path: found no text in {what}; the first is {files[0]}")
    for name, builder in builders.items():
        if not documents[name]:
            raise ValueError(
                f"--text-path: {seen} bytes of text in {sum(documents.values())} piece(s) are too "
                f"few for a {name} "
                f"split of {100 * split[SPLITS.index(name)]:.3g}%; give more text or another "
                "--split"
            )
        builder.finalize(get_idx_path(str(folder / name)))
    dataset = TextDataset(
        "", {}, tokens, written, documents, len(files) - len(skipped), skipped, tokenizer.identity()
    )
    return {
        key: value for key, value in asdict(dataset).items() if key not in ("folder", "prefixes")
    }
