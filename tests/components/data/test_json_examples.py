"""Examples in JSON lines."""

from pathlib import Path

import pytest

from drawloom.components.data.json_examples import JsonExamples
from drawloom.components.ports.corpus import Split
from drawloom.graph import UserError

SPLITS: tuple[Split, ...] = ("train", "validation")


def test_lines_are_examples_with_their_place(tmp_path: Path) -> None:
    """An object is an example, with file and line as its source; a line's split does not depend on others."""
    lines = [f'{{"input_ids": [{number}]}}' for number in range(50)]
    splits = []
    for name, members in (("all", lines), ("some", ["", *lines[::2]])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(members), "utf-8")
        data = JsonExamples(paths=[str(tmp_path / f"{name}.jsonl")], validation_fraction=0.4)
        data.open()
        splits.append(
            {split: [example["input_ids"][0] for example in data.examples(split)] for split in ("train", "validation")}
        )
    assert data.examples("train")[0]["source"].endswith("some.jsonl:2")
    assert sorted(splits[0]["train"] + splits[0]["validation"]) == list(range(50)) and len(splits[0]["train"]) > 20
    assert all(
        splits[1][split] == [number for number in members if number % 2 == 0] for split, members in splits[0].items()
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", ": a line must be an object and not an array"),
        ('{"input_ids"', r":1: not JSON \(Expecting ':' delimiter"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """The error has its file and number."""
    (tmp_path / "bad.jsonl").write_text(f'{{"input_ids": [1]}}\n{line}\n', "utf-8")
    with pytest.raises(UserError, match=f"bad.jsonl:2{message}"):
        JsonExamples(paths=[str(tmp_path / "*.jsonl")]).open()
