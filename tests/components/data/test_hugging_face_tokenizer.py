"""Tokenizers from a `tokenizer.json`."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer
from drawloom.graph import UserError


def write(folder: Path) -> Path:
    """Write a word tokenizer with settings that must not affect ids: a template, truncation, padding."""
    words = {"hello": 0, "world": 1, "<": 2, "end": 3, ">": 4, "?": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 6)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def open_tokenizer(path: Path, end_token: str = "<end>") -> HuggingFaceTokenizer:
    tokenizer = HuggingFaceTokenizer(path=path, end_token=end_token)
    tokenizer.open()
    return tokenizer


def test_only_the_text_is_encoded(tmp_path: Path) -> None:
    """Nothing is added, truncated or padded, whatever the file configures."""
    ids = open_tokenizer(write(tmp_path)).encode("hello world hello")
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 1, 0]


def test_text_cannot_forge_an_end(tmp_path: Path) -> None:
    """The end token's text is encoded as text."""
    tokenizer = open_tokenizer(write(tmp_path))
    ids = tokenizer.encode("hello <end> world")
    assert tokenizer.eos_id == 6
    assert 6 not in ids
    assert ids[0] == 0 and ids[-1] == 1


def test_vocab_size_is_above_the_highest_id(tmp_path: Path) -> None:
    """Added tokens count, and so do gaps in the numbering."""
    path = write(tmp_path)
    assert open_tokenizer(path).vocab_size == 7
    content = json.loads(path.read_text())
    content["model"]["vocab"]["far"] = 99
    path.write_text(json.dumps(content))
    assert open_tokenizer(path).vocab_size == 100


def test_special_tokens_are_not_decoded(tmp_path: Path) -> None:
    """Decoding returns the words without special tokens."""
    assert open_tokenizer(write(tmp_path)).decode([0, 1, 6]) == "hello world"


def test_an_unknown_end_token_lists_candidates(tmp_path: Path) -> None:
    """The error lists the file's special tokens."""
    with pytest.raises(UserError, match=r'has no token "</s>"; write one of "<end>"'):
        open_tokenizer(write(tmp_path), "</s>")


def test_invalid_paths_are_refused(tmp_path: Path) -> None:
    """A missing file, and a file that is not a tokenizer, are errors naming it."""
    with pytest.raises(UserError, match="there is no file"):
        open_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(UserError, match="is not a tokenizer"):
        open_tokenizer(tmp_path / "tokenizer.json")


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the command for installing it."""
    absent: Any = None
    monkeypatch.setitem(sys.modules, "tokenizers", absent)
    with pytest.raises(UserError, match=r"pip install 'drawloom\[tokenizers\]'"):
        open_tokenizer(write(tmp_path))


def test_saved_files_give_the_same_ids(tmp_path: Path) -> None:
    """The file and its companions are copied; a missing configuration is written."""
    source, one, two = tmp_path / "source", tmp_path / "one", tmp_path / "two"
    for folder in (source, one, two):
        folder.mkdir()
    path = write(source)
    open_tokenizer(path).save(one)
    assert (one / "tokenizer.json").read_bytes() == path.read_bytes()
    assert json.loads((one / "tokenizer_config.json").read_text())["eos_token"] == "<end>"
    (source / "tokenizer_config.json").write_text('{"mine": 1}')
    open_tokenizer(path).save(two)
    assert json.loads((two / "tokenizer_config.json").read_text()) == {"mine": 1}


@pytest.mark.parametrize("eos", ["<end>", {"content": "<end>", "special": True}])
def test_a_folder_says_its_end_token(eos: Any, tmp_path: Path) -> None:
    """A folder is read like its file, and the end token comes from tokenizer_config.json, in both of its forms."""
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    tokenizer = HuggingFaceTokenizer(path=tmp_path)
    tokenizer.open()
    assert tokenizer.eos_id == 6
    assert [path.name for path in tokenizer.list_input_files()["path"]] == ["tokenizer.json", "tokenizer_config.json"]


def test_an_end_token_that_nothing_says_is_asked_for(tmp_path: Path) -> None:
    """Without a setting and without a tokenizer_config.json the message lists the possible settings."""
    write(tmp_path)
    with pytest.raises(UserError, match=r'has no eos_token; write one of "<end>"'):
        HuggingFaceTokenizer(path=tmp_path).open()
