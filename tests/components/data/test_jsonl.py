"""A corpus of JSON lines."""

import gzip
import json
from pathlib import Path

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.jsonl import JsonLines
from drawloom.graph import UserError

texts = st.text(st.characters(exclude_categories=["Cs"]))


def corpus(folder: Path, content: str | bytes, **settings: object) -> JsonLines:
    file = folder / "a.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return JsonLines(paths=[str(file)], **settings)  # type: ignore[arg-type]


@given(st.lists(texts), st.booleans())
def test_texts_are_unchanged(tmp_path_factory: pytest.TempPathFactory, all: list[str], plain: bool) -> None:
    """Any text is read back in order, Unicode line separators and escapes included."""
    lines = "".join(json.dumps({"text": text, "id": 1}, ensure_ascii=not plain) + "\n" for text in all)
    folder = tmp_path_factory.mktemp("corpus", numbered=True)
    assert list(corpus(folder, lines, validation_fraction=0.0).documents("train")) == all


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_compressed_lines_are_read_over_frames(tmp_path: Path, name: str) -> None:
    """Lines of compressed files are read, also if a frame ends inside of a line; an error has the line's number."""
    compress = gzip.compress if name.endswith(".gz") else lambda part: bytes(pyarrow.compress(part, "zstd"))
    lines = [json.dumps({"text": f"{number} " * 999}) for number in range(99)]
    content = "\n".join(lines).encode()
    (tmp_path / name).write_bytes(compress(content[:100_001]) + compress(content[100_001:]))
    corpus = JsonLines(paths=[str(tmp_path / name)], validation_fraction=0.0)
    assert list(corpus.documents("train")) == [json.loads(line)["text"] for line in lines]
    (tmp_path / name).write_bytes(compress(content) + compress(b"\nx"))
    with pytest.raises(UserError, match=f"{name}:100:"):
        list(corpus.documents("train"))


def test_the_split_depends_on_the_text_not_its_position(tmp_path: Path) -> None:
    """Reordered lines keep every text in its split, and equal texts are in one split."""
    all = [json.dumps({"body": str(number)}) for number in range(60)] * 2
    for lines in (all, all[::-1]):
        mixed = corpus(tmp_path, "\n".join(lines), field="body", validation_fraction=0.3)
        validation = sorted(mixed.documents("validation"))
        train = sorted(mixed.documents("train"))
        assert not set(train) & set(validation)
        assert sorted(train + validation) == sorted(str(number) for number in range(60) for _ in range(2))
        if lines is all:
            expected = validation
    assert validation == expected
    assert validation


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    """A blank line, also the last one, is no document, but counts as a line."""
    assert list(corpus(tmp_path, '\n{"text": "a"}\n \n', validation_fraction=0.0).documents("train")) == ["a"]
    with pytest.raises(UserError, match=r"a\.jsonl:3:"):
        list(corpus(tmp_path, '\n{"text": "a"}\nx', validation_fraction=0.0).documents("train"))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "not JSON"),
        (b"[1]", "an object and not an array"),
        (b"null", "an object and not null"),
        (b'{"body": "a", "id": 1}', r'no field "text", only body, id'),
        (b"{}", r'no field "text", only none'),
        (b'{"text": 1}', "is a number"),
        (b'{"text": true}', "is a boolean"),
        (b'{"text": "\xff"}', "can't decode byte 0xff"),
        (b'{"text": "\\ud800"}', r"\\ud800, half of a surrogate pair"),
        (b"[" * 200_000, "can't be read"),
        (b'{"text": ' + b"1" * 5_000 + b"}", "can't be read"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    """A line without a document is an error with file, line and reason."""
    with pytest.raises(UserError, match=rf"a\.jsonl:2(:\d+)?: .*{reason}"):
        list(corpus(tmp_path, b'{"text": "a"}\n' + line + b"\n").documents("train"))


def test_a_few_lines_hold_out_their_ends(tmp_path: Path) -> None:
    """A file with one document is divided within it."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "0123456789"}) + "\n")
    corpus = JsonLines(paths=[f"{tmp_path}/a.jsonl"], validation_fraction=0.2)
    assert [list(corpus.documents(split)) for split in ("train", "validation")] == [["01234567"], ["89"]]
