"""What runs see of their data, from files to the audit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.runs import drawloom, write_corpus

RECORD = ("record.use=data.record", "edit.trainer.phases.after.@forward_backward=@record")
RUN = ("run", "tiny.toml", *RECORD, "checkpoint.every=2", "evaluate.every=100", "trainer.on_finish=[]")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, and a run on it that was stopped after four steps, and went on with two ranks."""
    folder = tmp_path_factory.mktemp("audit")
    write_corpus(folder)
    [made] = drawloom(folder, "tokenize", "corpus", "--to", "store")
    assert made.code == 0, made.text
    store = ("tokens.use=data.tokenized", "tokens.path=store", "packing.use=data.packing.best_fit", "packing.length=32")
    [first] = drawloom(folder, *RUN, *store, "trainer.steps=4")
    assert first.code == 0, first.text
    for outcome in drawloom(
        folder, *RUN, *store, "trainer.steps=30", "batch.micro_size=2", "--accept-changes", ranks=2
    ):
        assert outcome.code == 0, outcome.text
    return folder


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_has_seen_what_it_should(place: Path) -> None:
    """Over a resume with other ranks, and two epochs, each row was seen as often as it should be."""
    [outcome] = drawloom(place, "data", "audit", "runs/tiny")
    assert outcome.code == 0 and "30 steps: the data is what it should be" in outcome.text, outcome.text
    assert "2 times" in outcome.text


def planted(rows: list[Any]) -> None:
    """A row comes twice in a step, instead of another one."""
    rows[11]["rows"][0] = rows[11]["rows"][1]


def lost(rows: list[Any]) -> None:
    """A step is not there."""
    del rows[7]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (planted, ["step 12: row ", "is missing", "is there once too often"]),
        (lost, ["step 8: row ", "is missing"]),
    ],
)
def test_a_planted_fault_is_found(place: Path, change: Callable[[list[Any]], None], words: list[str]) -> None:
    """A duplicate and a loss in what was trained on are named by step and row."""
    path = place / "runs/tiny/rows/rank-0.jsonl"
    before = path.read_bytes()
    rows = lines(path)
    change(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [outcome] = drawloom(place, "data", "audit", "runs/tiny")
    path.write_bytes(before)
    assert outcome.code == 1 and all(word in outcome.text for word in words), outcome.text
    assert "the data differs from what it should be" in outcome.text
