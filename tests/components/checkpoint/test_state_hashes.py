"""Hashes of the state's tensors after steps."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.checkpoint.state_hashes import StateHashes, hash_states
from drawloom.components.ports.run import Step
from drawloom.components.storage.step_log import read_step_log
from drawloom.graph import Every, UserError
from support.checkpoints import FixedFolder, SingleRankMesh, StateNode


def _rows(folder: Path) -> list[dict[str, Any]]:
    return [line.row for line in read_step_log(folder / "digests/rank-0.jsonl")[0]]


def _node(folder: Path, **states: StateNode) -> StateHashes:
    return StateHashes(folder=FixedFolder(folder), mesh=SingleRankMesh(), states=Every(states))


def test_each_tensor_has_its_own_hash(tmp_path: Path) -> None:
    """One changed bit changes one hash; other values are under the node's name."""
    memory, other = StateNode({"weight": torch.zeros(3), "count": 1}), StateNode({"x": torch.ones(2)})
    node = _node(tmp_path, memory=memory, other=other)
    node.run_phase(Step(1, 9))
    memory.state["weight"][1] = -0.0
    node.run_phase(Step(2, 9))
    memory.state["count"] = 2
    node.run_phase(Step(3, 9))
    rows = [row["digests"] for row in _rows(tmp_path)]
    assert [*rows[0]] == ["memory/weight", "other/x", "memory", "other"]
    assert {name for name in rows[0] if rows[0][name] != rows[1][name]} == {"memory/weight"}
    assert {name for name in rows[1] if rows[1][name] != rows[2][name]} == {"memory"}


def test_equal_states_have_equal_digests() -> None:
    """The hash does not depend on strides."""
    table = torch.arange(6.0).reshape(2, 3)
    assert hash_states({"a": {"t": table.T}}) == hash_states({"a": {"t": table.T.contiguous()}})
    assert hash_states({"a": {"t": table}}) != hash_states({"a": {"t": table.T}})


def test_a_resumed_run_removes_later_steps(tmp_path: Path) -> None:
    """Later lines and an incomplete one are removed, so steps have one line."""
    node = _node(tmp_path, memory=StateNode({"a": 1}))
    for index in (1, 2, 3):
        node.run_phase(Step(index, 9))
    with (tmp_path / "digests/rank-0.jsonl").open("a") as file:
        file.write('{"step": 4, "dig')
    again = _node(tmp_path, memory=StateNode({"a": 2}))
    for index in (2, 3):
        again.run_phase(Step(index, 9))
    rows = _rows(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["digests"] != rows[1]["digests"] == rows[2]["digests"]


def test_damaged_lines_and_a_removed_folder_end_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A resume counts damaged lines; a folder removed meanwhile is written anew; both are warnings."""
    node = _node(tmp_path, memory=StateNode({"a": 1}))
    for index in (1, 2, 3):
        node.run_phase(Step(index, 9))
    path = tmp_path / "digests/rank-0.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step\0 2'))
    again = _node(tmp_path, memory=StateNode({"a": 1}))
    again.run_phase(Step(4, 9))
    assert [entry.getMessage() for entry in caplog.records] == [f"{path} is damaged: 1 line is unreadable (line 2)"]
    shutil.rmtree(tmp_path / "digests")
    again.run_phase(Step(5, 9))
    assert [row["step"] for row in _rows(tmp_path)] == [1, 3, 4, 5]
    assert caplog.records[-1].getMessage() == f"{path} was removed during the run, and is written anew"


def test_a_pipe_in_place_of_hashes_is_refused(tmp_path: Path) -> None:
    """A stranger's run folder cannot make a run wait."""
    (tmp_path / "digests").mkdir()
    os.mkfifo(tmp_path / "digests" / "rank-0.jsonl")
    with pytest.raises(UserError, match=r"rank-0\.jsonl can't be written .it is not a regular file"):
        _node(tmp_path, memory=StateNode({"a": 1})).run_phase(Step(1, 9))
