"""The command for writing token stores."""

import gzip
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from drawloom.components.data.store.store import Store
from drawloom.graph.cli.main import main


def write_tokenizer(folder: Path) -> Path:
    """Words with spaces between them; `<end>` ends a document."""
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2, "?": 3}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<end>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def documents(folder: Path) -> list[list[int]]:
    store = Store.open(folder)
    return [store.read(number, 0, int(length)).ids.tolist() for number, length in enumerate(store.lengths)]


def test_files_become_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files from a folder and from a glob are tokenized in their order; the command prints the store's contents."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"body": "x"}\n{"body": "y"}\n')
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(b'{"body": "z"}\n'))
    (tmp_path / "c.txt").write_text("text")
    arguments = ["tokenize", str(tmp_path / "in"), str(tmp_path / "*.txt"), "--to", str(tmp_path / "out")]
    assert main([*arguments, "--field", "body", "--workers", "1"]) == 0
    assert documents(tmp_path / "out") == [[120, 256], [121, 256], [122, 256], [*b"text", 256]]
    assert capsys.readouterr().out == f"{tmp_path}/out: 4 documents, 11 tokens\n"


def test_a_tokenizer_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The end token is the option's, or the tokenizer's own by its configuration; without one the command says so."""
    (tmp_path / "a.txt").write_text("a b")
    folder = write_tokenizer(tmp_path / "tokenizer")
    words = ["tokenize", str(tmp_path / "a.txt"), "--tokenizer", str(folder), "--to"]
    assert main([*words, str(tmp_path / "one"), "--end-token", "?"]) == 0
    assert main([*words, str(tmp_path / "two")]) == 2
    assert "tokenizer_config.json names no eos_token; write --end-token" in capsys.readouterr().err
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    assert main([*words, str(tmp_path / "two")]) == 0
    assert [documents(tmp_path / name) for name in ("one", "two")] == [[[0, 1, 3]], [[0, 1, 2]]]


def test_impossible_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Zero processes, a missing file, and an end token for bytes are errors in one line."""
    (tmp_path / "a.txt").touch()
    words = ["tokenize", str(tmp_path / "a.txt"), "--to", str(tmp_path / "out")]
    assert main([*words, "--end-token", "x"]) == 2
    assert main(["tokenize", str(tmp_path / "b.txt"), *words[2:]]) == 1
    assert main([*words, "--workers", "0"]) == 2
    assert "no file matches" in capsys.readouterr().err
    for tokenizer in ("a.txt", "missing.json"):
        assert main([*words, "--tokenizer", str(tmp_path / tokenizer)]) != 0
        assert f"{tokenizer}" in (said := capsys.readouterr().err) and "--end-token" not in said
