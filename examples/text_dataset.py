"""Text files -> Megatron's indexed dataset (``.bin`` / ``.idx``), tokenised once and kept.

A corpus is a list of files and folders. Every file is cut into pieces (documents), every piece goes
as a whole to the train, the valid or the test split, and each split becomes one indexed dataset, so
that what is held out was never trained on. The result lies in ``<cache folder>/<key>``, where the
key hashes everything that shapes it: the files' paths, sizes and modification times, the tokenizer,
the split weights. A second run finds it there and reads nothing.

Several processes may ask for the same corpus at once: the first to take the file lock builds in a
private folder and renames it into place, the others wait for that, bounded by a timeout. A builder
that dies releases its lock, so the next process tries itself and meets the same error: nobody waits
for a message that will never come.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import socket
import sysconfig
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from tqdm import tqdm

__all__ = [
    "SPLITS",
    "ByteTokenizer",
    "MegatronTextTokenizer",
    "TextDataset",
    "TextTokenizer",
    "build_text_dataset",
    "cut_text",
    "find_text_files",
    "parse_split",
    "standard_library_files",
]

SPLITS = ("train", "valid", "test")
# raise it when what the builder writes changes: old caches are then left alone and built anew
_FORMAT = 1
_MIN_PIECE, _MAX_PIECE, _PIECES = 1 << 6, 1 << 20, 256
_SNIFF = 8192
_LONGEST_CHARACTER = 4  # bytes, in UTF-8
_POLL_S = 0.2


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


def find_text_files(paths: Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files named by ``paths``: a file stands for itself, a folder for every file below it that
    is not hidden.

    Sorted, resolved, without duplicates.

    Raises:
        ValueError: a path does not exist, cannot be read, or nothing was found.
    """
    found: set[Path] = set()
    for given in paths:
        path = Path(given).expanduser()
        if path.is_file():
            found.add(path.resolve())
        elif path.is_dir():
            inside = []
            for folder, folders, names in os.walk(path):
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                inside += [Path(folder, name) for name in names if not name.startswith(".")]
            inside = [entry.resolve() for entry in inside if entry.is_file()]
            if not inside:
                raise ValueError(f"--text-path {given}: this folder holds no files")
            found.update(inside)
        else:
            raise ValueError(
                f"--text-path {given}: no such file or folder (looked from {Path.cwd()})"
            )
    if not found:
        raise ValueError("--text-path: no text was named")
    for path in found:
        if not os.access(path, os.R_OK):
            raise ValueError(f"--text-path: {path} cannot be read (permissions)")
    return sorted(found)


def standard_library_files() -> list[Path]:
    """The sources of this Python's standard library, without its tests: real text that every
    machine has.

    Raises:
        ValueError: this Python carries no sources (an embedded or zipped build).
    """
    root = Path(sysconfig.get_path("stdlib"))
    leave = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in leave)
        found += [Path(folder, name).resolve() for name in names if name.endswith(".py")]
    if not found:
        raise ValueError(
            f"this Python carries no library sources under {root}: name your own text with "
            "--text-path"
        )
    return sorted(set(found))


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
    if not 1 <= len(weights) <= len(SPLITS) or min(weights, default=-1.0) < 0 or not weights[0]:
        raise ValueError(
            f"--split: found {text!r}, allowed are weights of train, valid and test such as "
            '"95,5,0"'
        )
    weights += [0.0] * (len(SPLITS) - len(weights))
    total = sum(weights)
    return (weights[0] / total, weights[1] / total, weights[2] / total)


def cut_text(data: bytes, limit: int) -> list[bytes]:
    """``data`` in pieces of at most ``limit`` bytes, cut after a line's end, else between UTF-8
    characters."""
    pieces = []
    start = 0
    while len(data) - start > limit:
        end = data.rfind(b"\n", start, start + limit) + 1
        if not end:
            end = start + limit
            for back in range(min(_LONGEST_CHARACTER, limit)):
                if data[end - back] & 0xC0 != 0x80:  # 0b10xxxxxx continues a character
                    end -= back
                    break
        pieces.append(data[start:end])
        start = end
    if start < len(data):
        pieces.append(data[start:])
    return pieces


def build_text_dataset(
    files: Sequence[Path],
    tokenizer: TextTokenizer,
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
        ValueError: no text in the files, too little for the split, or text that the tokenizer
            cannot read.
        TimeoutError: another process has been building for more than ``wait_s`` seconds.
    """
    key = _cache_key(files, tokenizer, split)
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
    with _only_builder(root / f"{key}.lock", wait_s):
        if (
            done := _read(folder)
        ) is not None:  # somebody else finished it while this process waited
            return done
        host = socket.gethostname()
        for stale in root.glob(f"{key}.partial.{host}.*"):  # we hold the lock: its writer is dead
            shutil.rmtree(stale, ignore_errors=True)
        partial = root / f"{key}.partial.{host}.{os.getpid()}"
        partial.mkdir()
        try:
            summary = _tokenise(files, tokenizer, split, partial)
            (partial / "dataset.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
            try:
                partial.rename(folder)
            except OSError:
                if (
                    _read(folder) is None
                ):  # a node that does not see our lock may have been faster: same content
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    done = _read(folder)
    assert done is not None
    return done


def _cache_key(
    files: Sequence[Path], tokenizer: TextTokenizer, split: tuple[float, float, float]
) -> str:
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    parts = {"format": _FORMAT, "files": stats, "tokenizer": tokenizer.identity(), "split": split}
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def _read(folder: Path) -> TextDataset | None:
    """The finished dataset in ``folder``; None where there is none (a folder appears only when
    complete)."""
    try:
        summary = json.loads((folder / "dataset.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    prefixes = {name: str(folder / name) if summary["tokens"][name] else None for name in SPLITS}
    return TextDataset(folder=str(folder), prefixes=prefixes, **summary)


@contextmanager
def _only_builder(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file ``path``; the kernel releases it when its holder ends, however it ends."""
    began = time.monotonic()
    with open(path, "w", encoding="utf-8") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise ValueError(
                        f"--text-cache {path.parent}: its file system gives no file locks "
                        f"({error.strerror})"
                    ) from None
            if time.monotonic() - began > wait_s:
                raise TimeoutError(
                    f"another process has held {path} for more than {wait_s:.0f} s while it "
                    "tokenises this text; "
                    "raise --text-wait-minutes, or look whether it hangs"
                )
            time.sleep(_POLL_S)
        yield


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
    files: Sequence[Path], tokenizer: TextTokenizer, split: tuple[float, float, float], folder: Path
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
        total=total, unit="B", unit_scale=True, desc="tokenising text", mininterval=0.5
    ) as progress:
        for path in random.Random(0).sample(
            list(files), len(files)
        ):  # neighbours by name are alike: mix them
            data = path.read_bytes()
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
