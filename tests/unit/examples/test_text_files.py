"""examples/text_files.py and text_tokenizers.py: the files that are read, and their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.datasets.indexed_dataset import IndexedDataset

from tests.unit.examples.test_text_dataset import build, lines, td, write


def test_a_huggingface_tokenizer_folder(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    text = td.MegatronTextTokenizer(megatron_tokenizer(folder), str(folder))
    files = write(tmp_path / "in", a=lines(300))
    built = build(files, tmp_path, text)
    dataset = IndexedDataset(str(built.prefixes["train"]))
    again = megatron_tokenizer(folder)
    original = lines(300).decode()
    for index in range(len(dataset)):
        ids = dataset[index].tolist()
        assert ids[-1] == text.eod
        assert again.detokenize(ids[:-1]).strip() in original
    assert built.tokens["train"] < built.bytes["train"]
    assert sum(built.bytes.values()) == len(lines(300))
    # Another vocabulary under the same path is another tokenizer.
    tokenizer_folder(folder)  # of the same size, written anew
    other = td.MegatronTextTokenizer(megatron_tokenizer(folder), str(folder))
    assert build(files, tmp_path, other).folder != built.folder


def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer", end=None)
    with pytest.raises(ValueError, match=r"no end-of-text token.*eos_token"):
        td.MegatronTextTokenizer(megatron_tokenizer(folder), str(folder))


def test_text_that_a_tokenizer_cannot_read_is_named(tmp_path: Path) -> None:
    folder = tokenizer_folder(tmp_path / "tokenizer")
    text = td.MegatronTextTokenizer(megatron_tokenizer(folder), str(folder))
    files = write(
        tmp_path / "in", **{"good.txt": lines(50), "latin.txt": "süß\n".encode("latin-1") * 50}
    )
    with pytest.raises(ValueError, match=r"latin.txt \(piece \d+\) is not UTF-8"):
        build(files, tmp_path, text)
    assert build(files, tmp_path).files == 2


def test_binary_files_in_a_folder_are_left_out_and_listed(tmp_path: Path) -> None:
    files = write(
        tmp_path / "in", **{"text.txt": lines(100), "image.bin": b"\x89PNG\x00\x01" * 100}
    )
    built = build(files, tmp_path)
    assert built.files == 1
    assert built.skipped == [str((tmp_path / "in" / "image.bin").resolve())]
    assert sum(built.bytes.values()) == len(lines(100))


def test_files_and_folders_are_found_once_and_hidden_ones_left_out(tmp_path: Path) -> None:
    inner = tmp_path / "in" / "inner"
    inner.mkdir(parents=True)
    for path in (tmp_path / "in" / "a.txt", inner / "b.txt", inner / ".hidden", tmp_path / "c.txt"):
        path.write_text("text")
    (tmp_path / "in" / ".git").mkdir()
    (tmp_path / "in" / ".git" / "config").write_text("not text")
    found = td.find_text_files([tmp_path / "in", inner, tmp_path / "c.txt", tmp_path / "c.txt"])
    assert [path.name for path in found] == ["c.txt", "a.txt", "b.txt"]


def test_paths_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--text-path .*nowhere.txt: no such file or folder"):
        td.find_text_files([tmp_path / "nowhere.txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no files"):
        td.find_text_files([tmp_path / "empty"])
    with pytest.raises(ValueError, match="no text was named"):
        td.find_text_files([])
    files = write(tmp_path / "in", a=b"", b=b"")
    with pytest.raises(ValueError, match=r"found no text in 2 file\(s\)"):
        build(files, tmp_path)
    (tmp_path / "a_file").write_text("")
    with pytest.raises(ValueError, match=r"--text-cache .* cannot be created"):
        build(write(tmp_path / "in", c=lines(9)), tmp_path / "a_file")


def megatron_tokenizer(folder: Path) -> Any:
    from megatron.core.tokenizers import MegatronTokenizer

    return MegatronTokenizer.from_pretrained(
        tokenizer_path=str(folder), metadata_path={"library": "huggingface"}
    )


def tokenizer_folder(folder: Path, vocabulary: int = 300, end: str | None = "<end>") -> Path:
    """A byte-pair tokenizer trained on the spot, in the folder form that ``transformers`` reads."""
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end] if end else [],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([lines(50).decode()], trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": end} if end else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
