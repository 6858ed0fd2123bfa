"""JSON lines in byte ranges; `test_jsonl.py` tests the lines' contents."""

import json
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.sources import formats
from drawloom.components.data.sources.documents import iterate_texts
from drawloom.components.data.sources.files import find_files
from drawloom.components.data.sources.formats import read_json_lines_or_table_rows, split_json_lines_files
from drawloom.graph import UserError


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), max_size=12), st.data())
def test_each_line_is_in_one_range(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], data: st.DataObject
) -> None:
    """For any cut into ranges, they have all lines once and in order, at their offsets."""
    path = tmp_path_factory.mktemp("lines", numbered=True) / "a.jsonl"
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in texts]
    path.write_bytes(b"".join(lines))
    whole = split_json_lines_files(find_files([str(path)]), "text")[0]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(b"".join(lines)) - 1, 1)))))
    ranges = zip([0, *cuts], [*cuts, whole.end], strict=True)
    parts = [attrs.evolve(whole, begin=begin, end=end) for begin, end in ranges]
    documents = [document for part in parts for document in part.documents()]
    assert [document.text for document in documents] == texts
    assert [document.offset for document in documents] == [
        len(b"".join(lines[:number])) for number in range(len(lines))
    ]


def test_a_large_file_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of more bytes than a part is in several, whose sizes add up; an error still has the line's number."""
    monkeypatch.setattr(formats, "PART_BYTES", 40)
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some text"}\n' * 9 + "no object\n")
    parts = split_json_lines_files(find_files([str(path)]), "text")
    assert len(parts) == 6 and sum(part.byte_count for part in parts) == path.stat().st_size
    with pytest.raises(UserError, match=r"a\.jsonl:10:1: not JSON"):
        list(iterate_texts(parts))


def test_a_byte_order_mark_is_named(tmp_path: Path) -> None:
    """The line is as good as any other without it, so the error says how to be rid of it."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "some text"}\n', "utf-8-sig")
    with pytest.raises(UserError, match=r"a\.jsonl:1: begins with a byte order mark; save the file as UTF-8 without"):
        list(iterate_texts(split_json_lines_files(find_files([str(path)]), "text")))


@pytest.mark.parametrize("escaped", [r"\ud83d", r"\uDC00"])
def test_half_a_surrogate_pair_in_a_message_is_named(tmp_path: Path, escaped: str) -> None:
    """A conversation's line is refused by its number; both halves together are a character."""
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"content": ["\\ud83d\\ude00"]}}\n{{"content": ["{escaped}"]}}\n')
    lines = read_json_lines_or_table_rows([str(path)])
    assert next(lines).row == {"content": ["\N{GRINNING FACE}"]}
    with pytest.raises(UserError, match=rf"a\.jsonl:2: a text contains \{escaped.lower()}, half of a surrogate pair"):
        next(lines)
