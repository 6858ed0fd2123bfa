"""A corpus of text files."""

from pathlib import Path

import pytest

from drawloom.components.data.text_files import TextFiles
from drawloom.graph import UserError


def test_documents_of_both_splits_are_the_files(tmp_path: Path) -> None:
    """Each file is a document of one split, in the order of names."""
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text(str(number))
    corpus = TextFiles(paths=[f"{tmp_path}/*.txt"], validation_fraction=0.3)
    train, validation = ([int(text) for text in corpus.documents(split)] for split in ("train", "validation"))
    assert sorted(train + validation) == list(range(30))
    assert train == sorted(train)
    assert 0 < len(validation) < 20


def test_invalid_utf_8_is_refused_by_default(tmp_path: Path) -> None:
    """`invalid_bytes` chooses between an error and replacement."""
    (tmp_path / "a").write_bytes(b"\xff")
    paths = [f"{tmp_path}/a"]
    with pytest.raises(UserError, match="is not UTF-8"):
        list(TextFiles(paths=paths, validation_fraction=0.0).documents("train"))
    corpus = TextFiles(paths=paths, validation_fraction=0.0, invalid_bytes="replace")
    assert list(corpus.documents("train")) == ["\N{REPLACEMENT CHARACTER}"]


def test_an_empty_list_of_globs_is_refused() -> None:
    """`paths = []` is an invalid setting."""
    with pytest.raises(ValueError, match="paths"):
        TextFiles(paths=[])
