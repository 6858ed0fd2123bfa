"""Output of runs into a pipe or a file."""

import re
from pathlib import Path

from support.runs import drawloom, write_corpus


def test_a_run_in_a_pipe_prints_a_header_some_steps_and_a_summary(tmp_path: Path) -> None:
    """The summary lists saved and exported files; a dry run prints the same header without a run folder."""
    write_corpus(tmp_path)
    (dry,) = drawloom(tmp_path, "run", "tiny.toml", "--dry-run")
    assert dry.code == 0 and not (tmp_path / "runs/tiny").exists()
    header = dry.text.splitlines()
    labels = [line.split()[0] for line in header]
    assert labels == ["run", "model", "data", "device", "memory"] and "in runs/tiny" in header[0]
    (run,) = drawloom(tmp_path, "run", "tiny.toml")
    lines = run.text.splitlines()
    assert lines[: len(header)] == header
    assert [line.split("  ")[0] for line in lines if line.startswith("step")] == [
        "step 1/10",
        "step 5/10",
        "step 10/10",
    ]
    rest = "\n".join(lines)
    for part in (
        "checkpoint saved: runs/tiny/checkpoints/step-8",
        "exported to runs/tiny/export",
        "trained steps 1 to",
    ):
        assert part in rest
    assert re.search(r"\nbest    validation loss \d\.\d{4} after step (5|10)\n", rest)
    assert lines[-1].startswith("results in runs/tiny: checkpoints, export, log, metrics.jsonl")
