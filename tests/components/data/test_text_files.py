"""A corpus of text files."""

from pathlib import Path

import pytest

from drawloom.components.data.text_files import TextFiles
from drawloom.graph import UserError


def test_documents_of_both_splits_are_the_files(tmp_path: Path) -> None:
    """A file is a document in one split, in the order of names."""
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


@pytest.mark.parametrize("files", [1, 2, 11])
def test_a_few_files_are_divided_within(tmp_path: Path, files: int) -> None:
    """If a split has no file, each file is divided: nothing is lost, and neither split is empty."""
    texts = [f"{number} " + "text " * 40 for number in range(files)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_text(text)
    corpus = TextFiles(paths=[f"{tmp_path}/*.txt"], validation_fraction=0.001)
    train, validation = (list(corpus.documents(split)) for split in ("train", "validation"))
    assert [head + tail for head, tail in zip(train, validation, strict=True)] == texts
    assert all(head and tail for head, tail in zip(train, validation, strict=True))


def test_a_fraction_of_0_holds_nothing_out(tmp_path: Path) -> None:
    """All files are for training, whole."""
    (tmp_path / "a.txt").write_text("text")
    corpus = TextFiles(paths=[f"{tmp_path}/a.txt"], validation_fraction=0.0)
    assert list(corpus.documents("train")) == ["text"] and list(corpus.documents("validation")) == []


def test_empty_files_are_not_a_validation_split(tmp_path: Path) -> None:
    """If only one of several files has text, both splits have text."""
    for number in range(8):
        (tmp_path / f"{number}.txt").write_text("text " * 9 if number == 5 else "")
    corpus = TextFiles(paths=[f"{tmp_path}/*.txt"], validation_fraction=0.5)
    assert any(corpus.documents("train")) and any(corpus.documents("validation"))


@pytest.mark.parametrize(("name", "warnings"), [("b.jsonl.gz", 1), ("b.ndjson", 1), ("b.json", 0), ("b.txt", 0)])
def test_json_lines_are_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, warnings: int
) -> None:
    """Their JSON would be trained as text, also if a glob selects them among other files."""
    for file in ("a.txt", name):
        (tmp_path / file).write_text("text")
    TextFiles(paths=[f"{tmp_path}/*"]).check_before_open()
    assert [f"{tmp_path / name} is read as plain text" in text for text in caplog.messages] == [True] * warnings
