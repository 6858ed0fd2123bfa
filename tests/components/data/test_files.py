"""Text files as documents."""

import os
from pathlib import Path

import pytest

from drawloom.components.data.files import documents, find
from drawloom.graph import UserError


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a few files, created in another order than that of their names."""
    monkeypatch.chdir(tmp_path)
    for name in ("corpus/z.txt", "corpus/b/a.txt", "corpus/a.txt", "corpus/b/c/d.txt", "other/a.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    return tmp_path


def names(patterns: list[str]) -> list[str]:
    return [file.name for file in find(patterns)]


@pytest.mark.usefixtures("corpus")
def test_files_are_ordered_by_name() -> None:
    """`**` crosses folders; the order is by path below the first wildcard, not the file system's."""
    assert names(["corpus/**/*.txt"]) == ["a.txt", "b/a.txt", "b/c/d.txt", "z.txt"]


@pytest.mark.usefixtures("corpus")
def test_globs_keep_their_order_and_share_no_file() -> None:
    """A file that two globs match is listed once, at the first glob."""
    found = find(["corpus/z.txt", "corpus/*.txt", "other/*"])
    assert [str(file.path) for file in found] == ["corpus/z.txt", "corpus/a.txt", "other/a.txt"]


def test_a_link_is_no_second_document(corpus: Path) -> None:
    """A file that is also reached by a link is listed once."""
    (corpus / "corpus/y.txt").symlink_to("z.txt")
    assert names(["corpus/*.txt"]) == ["a.txt", "y.txt"]


def test_names_do_not_depend_on_the_location_of_the_corpus(corpus: Path) -> None:
    """An absolute glob gives the same names as a relative one."""
    assert names([f"{corpus}/corpus/**/*.txt"]) == names(["corpus/**/*.txt"])


@pytest.mark.usefixtures("corpus")
def test_a_glob_without_a_file_is_refused() -> None:
    """A glob that matches nothing, or only folders, is an error that names it, even next to one that matches."""
    for pattern in ("corpus/*.md", "corpus/b/*c"):
        with pytest.raises(UserError) as error:
            find(["corpus/*.txt", pattern])
        assert f'"{pattern}"' in str(error.value)


@pytest.mark.usefixtures("corpus")
def test_a_file_s_split_does_not_depend_on_other_files() -> None:
    """The splits are disjoint and complete, and an added file moves no other."""

    def splits() -> tuple[set[str], set[str]]:
        found = find(["corpus/**/*.txt"])
        return set(documents(found, "train", 0.735)), set(documents(found, "validation", 0.735))

    train, validation = splits()
    assert train | validation == {"corpus/z.txt", "corpus/b/a.txt", "corpus/a.txt", "corpus/b/c/d.txt"}
    assert not train & validation
    for number in range(20):
        Path(f"corpus/{number}.txt").write_text("new")
    more_train, more_validation = splits()
    assert more_train - {"new"} == train
    assert more_validation - {"new"} == validation


def test_line_ends_are_unchanged(tmp_path: Path) -> None:
    """A text has the file's carriage returns, and no added final newline."""
    (tmp_path / "a").write_bytes(b"one\r\ntwo\r\xc3\xa9")
    assert list(documents(find([f"{tmp_path}/a"]), "train", 0.0)) == ["one\r\ntwo\ré"]


def test_invalid_utf_8_is_refused_or_replaced(tmp_path: Path) -> None:
    """The error has file, offset and value; replacement is optional."""
    (tmp_path / "a").write_bytes(b"caf\xe9.")
    found = find([f"{tmp_path}/a"])
    with pytest.raises(UserError, match=r"a: byte 3 \(0xe9\) is not UTF-8"):
        list(documents(found, "train", 0.0))
    assert list(documents(found, "train", 0.0, replace=True)) == ["caf\N{REPLACEMENT CHARACTER}."]


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    """A file that vanishes after it was found is an error that names it."""
    (tmp_path / "a").touch()
    found = find([f"{tmp_path}/a"])
    (tmp_path / "a").unlink()
    with pytest.raises(UserError, match="a: can't be read"):
        list(documents(found, "train", 0.0))


def test_file_names_need_not_be_utf_8(tmp_path: Path) -> None:
    """A file name is bytes to the operating system, and any name has a split."""
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("text")
    assert list(documents(find([f"{tmp_path}/*"]), "train", 0.0)) == ["text"]
