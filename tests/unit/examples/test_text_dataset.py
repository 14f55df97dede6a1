"""examples/text_dataset.py: what goes in comes out, once, split for good, and nobody waits for
ever. examples/text_files.py and text_tokenizers.py: the files that are read, and their tokens."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest

pytest.importorskip("tqdm")

import text_dataset as td  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: E402
from text_cache import only_builder  # noqa: E402

HALF = (0.5, 0.5, 0.0)


def write(folder: Path, **texts: bytes) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    return td.find_text_files([folder])


def lines(count: int, word: str = "line") -> bytes:
    return "".join(f"{word} number {index} with an umlaut: ü\n" for index in range(count)).encode()


def build(files: Any, folder: Path, tokenizer: Any = None, split: Any = HALF) -> Any:
    return td.build_text_dataset(files, tokenizer or td.ByteTokenizer(), split, folder / "cache")


def documents(prefix: str | None) -> list[bytes]:
    """The documents of a byte-level data set, each without its end, which must be there."""
    assert prefix is not None
    dataset = IndexedDataset(prefix)
    found = []
    for ids in (dataset[index] for index in range(len(dataset))):
        assert ids[-1] == td.ByteTokenizer.eod
        found.append(ids[:-1].astype(numpy.uint8).tobytes())
    return found


def test_every_byte_comes_back_in_exactly_one_split(tmp_path: Path) -> None:
    texts = {"a": lines(300), "b": bytes(range(1, 256)) * 20, "c": b"no end of line" * 500}
    files = write(tmp_path / "in", **texts)
    built = build(files, tmp_path, split=(0.7, 0.2, 0.1))
    parts = {split: documents(built.prefixes[split]) for split in td.SPLITS}
    everything = [piece for pieces in parts.values() for piece in pieces]
    assert sorted(b"".join(everything)) == sorted(b"".join(texts.values()))
    assert all(any(piece in text for text in texts.values()) for piece in everything)
    assert {split: sum(map(len, pieces)) for split, pieces in parts.items()} == built.bytes
    assert {split: built.bytes[split] + len(parts[split]) for split in parts} == built.tokens
    total = sum(built.bytes.values())
    for split, share in zip(td.SPLITS, (0.7, 0.2, 0.1), strict=True):
        assert abs(built.bytes[split] / total - share) < 0.05
    assert built.files == 3
    nothing = build(files, tmp_path)
    assert nothing.prefixes["test"] is None and nothing.tokens["test"] == 0


def test_one_small_file_still_has_a_held_out_part(tmp_path: Path) -> None:
    built = build(write(tmp_path / "in", a=lines(150)), tmp_path, split=td.parse_split("95,5,0"))
    held_out = documents(built.prefixes["valid"])
    trained_on = b"\x00".join(documents(built.prefixes["train"]))
    assert held_out and all(piece not in trained_on for piece in held_out)


CHANGES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "content": lambda folder: {"files": write(folder, a=lines(201))},
    "time": lambda folder: os.utime(folder / "a", ns=(1, 1)) or {},  # type: ignore[func-returns-value]
    "file": lambda folder: {"files": write(folder, b=lines(3, "new"))},
    "split": lambda folder: {"split": (0.75, 0.25, 0.0)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_cache_is_left_when_something_changes(tmp_path: Path, change: str) -> None:
    first_of: dict[str, Any] = {"files": write(tmp_path / "in", a=lines(200)), "folder": tmp_path}
    first = build(**first_of)
    second = build(**first_of | CHANGES[change](tmp_path / "in"))
    assert second.folder != first.folder
    assert Path(first.folder, "train.bin").is_file()


def test_a_build_that_fails_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    files, fails = write(tmp_path / "in", a=lines(200)), td.ByteTokenizer()
    fails.encode = mock.Mock(side_effect=ValueError("cannot read"))
    with pytest.raises(ValueError, match="cannot read"):
        build(files, tmp_path, fails)
    assert fails.encode.call_args.args[1].endswith("a (piece 0)")
    fails.encode.side_effect = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ValueError, match=r"--text-cache .*\(No space left .*another folder with"):
        build(files, tmp_path, fails)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == []
    assert build(files, tmp_path).tokens["train"] > 0


def test_waiting_for_a_builder_is_bounded_and_names_its_lock(tmp_path: Path) -> None:
    lock = tmp_path / "key.lock"
    with only_builder(lock, 1.0):
        said = pytest.raises(TimeoutError, match=f"{lock}.*--text-wait-minutes")
        with said, only_builder(lock, 0.5):
            pass
    with only_builder(lock, 1.0):
        pass


@pytest.mark.parametrize("name", ["dataset.json", "valid.idx", "train.bin"])
def test_a_damaged_cache_is_refused_by_path(tmp_path: Path, name: str) -> None:
    files = write(tmp_path / "in", a=lines(200))
    built = build(files, tmp_path)
    path = Path(built.folder, name)
    content = path.read_bytes()
    one_bit = content[:100] + bytes([content[100] ^ 1]) + content[101:]
    path.write_bytes(one_bit if name == "train.bin" else content[:40])
    with pytest.raises(ValueError, match=f"{path} is damaged: .*remove the folder {built.folder}"):
        build(files, tmp_path)


def test_too_little_text_is_refused_with_figures(tmp_path: Path) -> None:
    files = write(tmp_path / "in", a=b"tiny\n")
    with pytest.raises(ValueError, match=r"5 bytes of text.* are too few"):
        build(files, tmp_path)
    built = build(write(tmp_path / "in", a=lines(30)), tmp_path)
    shortest = min(built.tokens["train"], built.tokens["valid"])
    built.require_length(shortest - 1)
    with pytest.raises(ValueError, match=rf"--seq-length {shortest} needs at least {shortest + 1}"):
        built.require_length(shortest)


def test_split_weights() -> None:
    for text, fractions in (("95,5,0", (0.95, 0.05, 0)), ("1", (1, 0, 0))):
        assert td.parse_split(text) == pytest.approx(fractions)
    for text in ("", "a,b", "0,1,1", "1,-1", "1,1,1,1", "inf,1", "nan,1", "1e308,1e308"):
        with pytest.raises(ValueError, match="--split: found"):
            td.parse_split(text)


def test_cutting_loses_nothing_and_ends_pieces_with_lines() -> None:
    for data, limit in ((lines(20), 64), (b"\n" * 9, 4), (bytes(5000), 7), (b"", 7)):
        pieces = td.cut_text(data, limit)
        assert b"".join(pieces) == data and all(0 < len(piece) <= limit for piece in pieces)
        assert data.count(b"\n") == 0 or all(piece.endswith(b"\n") for piece in pieces)


def test_binary_files_in_a_folder_are_left_out_and_listed(tmp_path: Path) -> None:
    texts = {"text.txt": lines(100), "image.bin": b"\x89PNG\x00\x01" * 100}
    built = build(write(tmp_path / "in", **texts), tmp_path)
    assert (built.files, sum(built.bytes.values())) == (1, len(lines(100)))
    assert built.skipped == [str((tmp_path / "in" / "image.bin").resolve())]


def test_files_and_folders_are_found_once_and_hidden_ones_left_out(tmp_path: Path) -> None:
    for name in ("in/a.txt", "in/inner/b.txt", "in/inner/.hidden", "in/.git/config", "c.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    given = ("in", "in/inner", "c.txt", "c.txt")
    found = td.find_text_files([tmp_path / name for name in given])
    assert [path.name for path in found] == ["c.txt", "a.txt", "b.txt"]


def test_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    wrong = {"nowhere": "--text-path .*nowhere: no such file or folder", "empty": "holds no files"}
    for name, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            td.find_text_files([tmp_path / name])
    for paths, said in (([""], "--text-path: found '', allow"), ([], "no text was named")):
        with pytest.raises(ValueError, match=said):
            td.find_text_files(paths)
    files = write(tmp_path / "in", a=b"", b=b"")
    with pytest.raises(ValueError, match=r"found no text in 2 file\(s\)"):
        build(files, tmp_path)
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ValueError, match=r"--text-cache .* cannot be created"):
        build(write(tmp_path / "in", c=lines(9)), tmp_path / "a_file")
