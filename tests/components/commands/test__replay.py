"""Recorded hashes of several ranks."""

import json
from pathlib import Path

from drawloom.components.commands._replay import Record


def write_hashes(run: Path, *ranks: str) -> Record:
    """Write a digest per rank after one phase, and read them."""
    (run / "digests").mkdir(parents=True)
    for rank, digest in enumerate(ranks):
        row = {"step": 1, "phase": "clip", "digests": {"weight": digest}}
        (run / f"digests/phases-{rank}.jsonl").write_text(json.dumps(row) + "\n{", "utf-8")
    return Record.read(run)


def test_difference_on_a_later_rank_is_found(tmp_path: Path) -> None:
    """Ranks with equal hashes and one other tensor differ on this rank alone."""
    one, other = (write_hashes(tmp_path / name, *name) for name in ("abc", "abd"))
    assert one.hashes == {(1, "clip"): {"weight": "a", "rank 1: weight": "b", "rank 2: weight": "c"}}
    difference = one.find_different_phase(other)
    assert difference is not None and difference.names == ["rank 2: weight"]
