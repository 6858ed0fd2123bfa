"""Recorded hashes of several ranks."""

import json
from pathlib import Path

from drawloom.components.commands.runs._replay import RecordedSteps


def write_hashes(run: Path, *ranks: str, name: str = "weight") -> RecordedSteps:
    """Write a digest per rank after one phase, and read them."""
    (run / "digests").mkdir(parents=True)
    for rank, digest in enumerate(ranks):
        row = {"step": 1, "phase": "clip", "digests": {name: digest}}
        (run / f"digests/phases-{rank}.jsonl").write_text(json.dumps(row) + "\n{", "utf-8")
    return RecordedSteps.read(run)


def test_difference_on_a_later_rank_is_found(tmp_path: Path) -> None:
    """Ranks with equal hashes and one other tensor differ on this rank alone."""
    one, other = (write_hashes(tmp_path / name, *name) for name in ("abc", "abd"))
    assert one.hashes == {(1, "clip"): {"weight": "a", "rank 1: weight": "b", "rank 2: weight": "c"}}
    difference = one.find_different_phase(other)
    assert difference is not None and difference.names == ["rank 2: weight"]


def test_hashes_of_many_tensors_are_read(tmp_path: Path) -> None:
    """A line may be longer than lines from a stranger's metrics."""
    name = "w" * 2**21
    assert write_hashes(tmp_path, "a", name=name).hashes == {(1, "clip"): {name: "a"}}
