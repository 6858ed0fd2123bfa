"""The record of rows seen by steps."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.data.batch_checks import compute_row_digests
from drawloom.components.data.record import Record
from drawloom.components.ports.data import TokenBatch
from drawloom.components.ports.run import Batching, Step
from drawloom.components.storage.step_log import encode_row, read_step_log
from drawloom.graph import UserError
from drawloom.graph.testing import fake
from support.checkpoints import FixedFolder, SingleRankMesh
from support.clips import clips

ONE = encode_row({"step": 1})


def batch(*rows: int) -> TokenBatch:
    columns = torch.tensor(rows)[:, None].expand(-1, 3)
    return TokenBatch(columns, columns, columns, columns, columns.float())


def record(folder: Path) -> Record:
    batching = fake(Batching, dp_rank=0, dp_size=1)
    return Record(folder=FixedFolder(folder), mesh=SingleRankMesh(), batching=batching)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line.row for line in read_step_log(folder / "rows/rank-0.jsonl")[0]]


def test_each_row_has_its_own_digest() -> None:
    """Rows with a difference in any tensor have different digests, at any place in a batch."""
    one, two = compute_row_digests(batch(1, 2))
    assert one != two and compute_row_digests(batch(2)) == [two]
    changes: list[dict[str, Any]] = [{name: torch.full((1, 3), 9.0)} for name in ("weights", "targets")]
    changed = [batch(1).evolve(**change) for change in changes]
    assert len({one, *(digest for change in changed for digest in compute_row_digests(change))}) == 3


def test_each_step_has_a_line(tmp_path: Path) -> None:
    """A step's line has the digests of the rows in all its microbatches, and the data-parallel part they are."""
    record(tmp_path).run_phase(Step(1, 9, state={"batches": [batch(1, 2), batch(3)]}))
    assert lines(tmp_path) == [{"step": 1, "part": 0, "parts": 1, "rows": compute_row_digests(batch(1, 2, 3))}]


def test_a_resumed_run_removes_later_steps(tmp_path: Path) -> None:
    """Resuming removes later lines, an incomplete line, and lines from removed ranks."""
    first = record(tmp_path)
    for step in (1, 2, 3):
        first.run_phase(Step(step, 9, state={"batches": [batch(step)]}))
    (tmp_path / "rows/rank-1.jsonl").write_bytes(ONE + encode_row({"step": 2}) + b'{"ste')
    record(tmp_path).run_phase(Step(2, 9, state={"batches": [batch(7)]}))
    assert [(line["step"], line["rows"]) for line in lines(tmp_path)] == [
        (1, compute_row_digests(batch(1))),
        (2, compute_row_digests(batch(7))),
    ]
    assert (tmp_path / "rows/rank-1.jsonl").read_bytes() == ONE


def test_damaged_lines_and_a_removed_folder_end_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume counts damaged lines; a folder removed meanwhile is written anew; both are warnings."""
    node = record(tmp_path)
    for step in (1, 2, 3):
        node.run_phase(Step(step, 9, state={"batches": [batch(step)]}))
    path = tmp_path / "rows/rank-0.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step\0 2'))
    again = record(tmp_path)
    again.run_phase(Step(4, 9, state={"batches": [batch(4)]}))
    assert [entry.getMessage() for entry in caplog.records] == [f"{path} is damaged: 1 line is unreadable (line 2)"]
    shutil.rmtree(tmp_path / "rows")
    again.run_phase(Step(5, 9, state={"batches": [batch(5)]}))
    assert [line["step"] for line in lines(tmp_path)] == [1, 3, 4, 5]
    assert caplog.records[-1].getMessage() == f"{path} was removed during the run, and is written anew"


def test_a_pipe_in_place_of_a_record_is_refused(tmp_path: Path) -> None:
    """A run folder from a stranger can't make a run wait, also with a nonexistent rank's file."""
    for name in ("rank-0", "rank-7"):
        folder = tmp_path / name
        (folder / "rows").mkdir(parents=True)
        os.mkfifo(folder / "rows" / f"{name}.jsonl")
        with pytest.raises(UserError, match=f"rows/{name}.jsonl can't be written .it is not a regular file"):
            record(folder).run_phase(Step(1, 9, state={"batches": [batch(1)]}))


def test_digests_are_of_the_leaves_that_rows_have() -> None:
    """A row of an own batch has the same digest in any batch, whatever all rows share."""
    one, two = compute_row_digests(clips([1, 2]))
    assert one != two and compute_row_digests(clips([2], scale=torch.tensor(7.0))) == [two]
    assert compute_row_digests(clips([2]).evolve(labels=torch.tensor([9]))) != [two]
