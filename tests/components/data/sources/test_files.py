"""Files of a corpus."""

import gzip
import os
from pathlib import Path

import fsspec
import pyarrow
import pytest

from drawloom.components.data.sources.files import File, find_files, group_files, open_file
from drawloom.graph import UserError


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a current directory with a few files, created in another order than their names'."""
    monkeypatch.chdir(tmp_path)
    for name in ("corpus/z.txt", "corpus/b/a.txt", "corpus/a.txt", "corpus/b/c/d.txt", "other/a.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)
    return tmp_path


def names(patterns: list[str]) -> list[str]:
    return [file.name for file in find_files(patterns)]


@pytest.mark.usefixtures("corpus")
def test_files_are_ordered_by_name() -> None:
    """`**` crosses folders; the order is by path below the first wildcard, not the file system's."""
    assert names(["corpus/**/*.txt"]) == ["a.txt", "b/a.txt", "b/c/d.txt", "z.txt"]


@pytest.mark.usefixtures("corpus")
def test_globs_keep_their_order_and_share_no_file() -> None:
    """A file matched by two globs is listed once, at the first glob."""
    files = find_files(["corpus/z.txt", "corpus/*.txt", "other/*"])
    assert [str(file.path) for file in files] == ["corpus/z.txt", "corpus/a.txt", "other/a.txt"]


def test_a_link_adds_no_second_document(corpus: Path) -> None:
    """A file reached directly and by a link is listed once."""
    (corpus / "corpus/y.txt").symlink_to("z.txt")
    assert names(["corpus/*.txt"]) == ["a.txt", "y.txt"]


def test_names_do_not_depend_on_the_location_of_the_corpus(corpus: Path) -> None:
    """An absolute glob gives the same names as a relative one."""
    assert names([f"{corpus}/corpus/**/*.txt"]) == names(["corpus/**/*.txt"])


@pytest.mark.usefixtures("corpus")
def test_a_glob_without_a_file_is_refused() -> None:
    """A glob without a match, or with only folders, is an error naming it, even next to a matching one."""
    for pattern in ("corpus/*.md", "corpus/b/*c"):
        with pytest.raises(UserError) as error:
            find_files(["corpus/*.txt", pattern])
        assert f'"{pattern}"' in str(error.value)


def read(patterns: list[str]) -> list[bytes]:
    """Return the content of all files."""
    contents = []
    for file in find_files(patterns):
        with open_file(file) as stream:
            contents.append(stream.read())
    return contents


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    """A file that vanishes after the listing is an error naming it."""
    (tmp_path / "a").touch()
    files = find_files([f"{tmp_path}/a"])
    (tmp_path / "a").unlink()
    with pytest.raises(UserError, match="a: can't be read"), open_file(files[0]):
        pass


def test_a_changed_file_has_another_version(tmp_path: Path) -> None:
    """A file with the same size and modification time, but other content, differs from the one before."""
    path = tmp_path / "a"
    path.write_text("one")
    before = find_files([str(path)])
    os.utime(path, ns=(1, 1))
    path.write_text("two")
    os.utime(path, ns=(1, 1))
    assert find_files([str(path)]) != before and find_files([str(path)]) == find_files([str(path)])


def test_compressed_files_are_decompressed(tmp_path: Path) -> None:
    """`.gz` and `.zst` files, also with several frames, are decompressed, and their inner formats recognized."""
    two_frames = gzip.compress(b"one ") + gzip.compress(b"two")
    (tmp_path / "a.jsonl.gz").write_bytes(two_frames)
    (tmp_path / "b.txt.zst").write_bytes(b"".join(bytes(pyarrow.compress(part, "zstd")) for part in (b"one ", b"two")))
    assert read([f"{tmp_path}/*"]) == [b"one two", b"one two"]
    assert [file.suffix for file in find_files([f"{tmp_path}/*"])] == [".jsonl", ".txt"]


@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
def test_a_cut_off_compressed_file_is_an_error(tmp_path: Path, name: str) -> None:
    """A file whose end is missing is named, and not read as far as it goes."""
    content = os.urandom(2**18)
    packed = gzip.compress(content) if name == "a.gz" else bytes(pyarrow.compress(content, "zstd"))
    (tmp_path / name).write_bytes(packed[: len(packed) * 3 // 4])
    with pytest.raises(UserError, match=f"{name}: can't be read"):
        read([f"{tmp_path}/{name}"])


def test_a_folder_is_all_files_below_it(tmp_path: Path) -> None:
    """A folder's path means the glob for all its files, with the same names."""
    (tmp_path / "b").mkdir()
    for name in ("b/two.txt", "one.txt"):
        (tmp_path / name).touch()
    for path in (f"{tmp_path}", f"{tmp_path}/", f"{tmp_path}/**/*"):
        assert [file.name for file in find_files([path])] == ["b/two.txt", "one.txt"]


def test_a_url_is_read_by_fsspec() -> None:
    """A glob of another file system has files with names, sizes and versions as a local one."""
    system = fsspec.filesystem("memory")
    system.pipe({"/corpus/b/two.txt": b"two", "/corpus/one.txt": b"first"})
    try:
        files = find_files(["memory://corpus/**/*.txt"])
        assert [(file.name, file.size) for file in files] == [("b/two.txt", 3), ("one.txt", 5)]
        assert read(["memory://corpus/**/*.txt"]) == [b"two", b"first"]
        with pytest.raises(UserError, match="no file matches"):
            find_files(["memory://corpus/*.md"])
    finally:
        system.rm("/corpus", recursive=True)


def test_a_protocol_without_a_package_is_refused() -> None:
    """A URL of an unknown protocol is an error with its name."""
    with pytest.raises(UserError, match="nowhere://x"):
        find_files(["nowhere://x"])


def test_groups_keep_the_order_and_their_size() -> None:
    """Groups have at most the maximum of bytes; a larger file has its own group."""
    files = [File(str(number), "", size, "") for number, size in enumerate([3, 4, 20, 1, 2, 8])]
    assert [[file.size for file in group] for group in group_files(files, 8)] == [[3, 4], [20], [1, 2], [8]]
    assert list(group_files([], 8)) == []
