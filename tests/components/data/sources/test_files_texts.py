"""Text files as documents."""

import os
from pathlib import Path

import pytest

from drawloom.components.data.sources.documents import PART_BYTES, iterate_texts, wrap_parts_for_split
from drawloom.components.data.sources.files import find_files, group_text_files
from drawloom.graph import UserError


def texts(pattern: str, replace: bool = False) -> list[str]:
    return list(iterate_texts(group_text_files(find_files([pattern]), replace)))


def test_the_split_of_a_file_does_not_depend_on_other_files(tmp_path: Path) -> None:
    """The splits are disjoint and complete, and an added file moves no other."""

    def splits() -> tuple[set[str], set[str]]:
        parts = group_text_files(find_files([f"{tmp_path}/*.txt"]))
        return set(iterate_texts(wrap_parts_for_split(parts, "train", 0.5))), set(
            iterate_texts(wrap_parts_for_split(parts, "validation", 0.5))
        )

    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(str(number))
    train, validation = splits()
    assert train | validation == set(map(str, range(20)))
    assert train and validation and not train & validation
    for number in range(20):
        (tmp_path / f"new{number}.txt").write_text("new")
    more_train, more_validation = splits()
    assert more_train - {"new"} == train
    assert more_validation - {"new"} == validation


def test_line_ends_are_unchanged(tmp_path: Path) -> None:
    """A text has the file's carriage returns, and no added final newline."""
    (tmp_path / "a").write_bytes(b"one\r\ntwo\r\xc3\xa9")
    assert texts(f"{tmp_path}/a") == ["one\r\ntwo\ré"]


def test_invalid_utf_8_is_refused_or_replaced(tmp_path: Path) -> None:
    """The error has file, offset and value; replacement is optional."""
    (tmp_path / "a").write_bytes(b"caf\xe9.")
    with pytest.raises(UserError, match=r"a: byte 3 \(0xe9\) is not UTF-8"):
        texts(f"{tmp_path}/a")
    assert texts(f"{tmp_path}/a", replace=True) == ["caf\N{REPLACEMENT CHARACTER}."]


def test_file_names_need_not_be_utf_8(tmp_path: Path) -> None:
    """A file name is bytes to the operating system, and any name has a split."""
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("text")
    parts = group_text_files(find_files([f"{tmp_path}/*"]))
    assert list(iterate_texts(wrap_parts_for_split(parts, "train", 0.0))) == ["text"]


def test_files_larger_than_a_part_are_divided_among_several(tmp_path: Path) -> None:
    """Files with more bytes together than a part are divided among several, whole and in order."""
    for number in range(3):
        with (tmp_path / f"{number}.txt").open("wb") as file:
            file.truncate(PART_BYTES // 2)
    parts = group_text_files(find_files([f"{tmp_path}/*.txt"]))
    assert [[file.name for file in part.files] for part in parts] == [["0.txt", "1.txt"], ["2.txt"]]
    assert [part.byte_count for part in parts] == [PART_BYTES, PART_BYTES // 2]
