"""Files of text as documents."""

import os
from pathlib import Path

import pytest

from drawloom.components.data.files import documents, find
from drawloom.graph import UserError


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a few files, made in an order that is not that of their names."""
    monkeypatch.chdir(tmp_path)
    for name in ("corpus/z.txt", "corpus/b/a.txt", "corpus/a.txt", "corpus/b/c/d.txt", "other/a.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    return tmp_path


def names(patterns: list[str]) -> list[str]:
    return [file.name for file in find(patterns)]


@pytest.mark.usefixtures("corpus")
def test_files_come_by_name() -> None:
    """`**` crosses folders, and files come by the path below the first wildcard, whatever the file system says."""
    assert names(["corpus/**/*.txt"]) == ["a.txt", "b/a.txt", "b/c/d.txt", "z.txt"]


@pytest.mark.usefixtures("corpus")
def test_globs_keep_their_order_and_share_no_file() -> None:
    """A file that two globs match comes once, where the first glob put it."""
    found = find(["corpus/z.txt", "corpus/*.txt", "other/*"])
    assert [str(file.path) for file in found] == ["corpus/z.txt", "corpus/a.txt", "other/a.txt"]


def test_a_link_is_no_second_document(corpus: Path) -> None:
    """A file that is reached by a link as well comes once."""
    (corpus / "corpus/y.txt").symlink_to("z.txt")
    assert names(["corpus/*.txt"]) == ["a.txt", "y.txt"]


def test_names_do_not_depend_on_where_the_corpus_lies(corpus: Path) -> None:
    """An absolute glob gives the names that a relative one gives."""
    assert names([f"{corpus}/corpus/**/*.txt"]) == names(["corpus/**/*.txt"])


@pytest.mark.usefixtures("corpus")
def test_glob_without_a_file_is_named() -> None:
    """A glob that matches nothing, or only folders, is an error that names it, even beside one that matches."""
    for pattern in ("corpus/*.md", "corpus/b/*c"):
        with pytest.raises(UserError) as error:
            find(["corpus/*.txt", pattern])
        assert f'"{pattern}"' in str(error.value)


@pytest.mark.usefixtures("corpus")
def test_every_file_is_in_one_split_whatever_stands_beside_it() -> None:
    """The splits share no document and lose none, and a file that is added moves no other."""

    def splits() -> tuple[set[str], set[str]]:
        found = find(["corpus/**/*.txt"])
        return set(documents(found, "train", 0.5)), set(documents(found, "validation", 0.5))

    train, held_out = splits()
    assert train | held_out == {"corpus/z.txt", "corpus/b/a.txt", "corpus/a.txt", "corpus/b/c/d.txt"}
    assert not train & held_out
    for number in range(20):
        Path(f"corpus/{number}.txt").write_text("new")
    more_train, more_held_out = splits()
    assert more_train - {"new"} == train
    assert more_held_out - {"new"} == held_out


def test_line_ends_stay(tmp_path: Path) -> None:
    """A text is the file's bytes, with carriage returns and without a last newline."""
    (tmp_path / "a").write_bytes(b"one\r\ntwo\r\xc3\xa9")
    assert list(documents(find([f"{tmp_path}/a"]), "train", 0.0)) == ["one\r\ntwo\ré"]


def test_bytes_that_are_no_utf_8(tmp_path: Path) -> None:
    """They are refused with file, place and value, or replaced on demand."""
    (tmp_path / "a").write_bytes(b"caf\xe9.")
    found = find([f"{tmp_path}/a"])
    with pytest.raises(UserError, match=r"a: byte 3 \(0xe9\) is not UTF-8"):
        list(documents(found, "train", 0.0))
    assert list(documents(found, "train", 0.0, replace=True)) == ["caf\N{REPLACEMENT CHARACTER}."]


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A file that vanishes after it was found is an error that names it."""
    (tmp_path / "a").touch()
    found = find([f"{tmp_path}/a"])
    (tmp_path / "a").unlink()
    with pytest.raises(UserError, match="a: can't be read"):
        list(documents(found, "train", 0.0))


def test_names_that_are_no_utf_8_can_be_split(tmp_path: Path) -> None:
    """A file name is bytes to the operating system, and any will do."""
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt")).write_text("text")
    assert list(documents(find([f"{tmp_path}/*"]), "train", 0.0)) == ["text"]
