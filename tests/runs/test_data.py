"""Data of runs, from files to the audit of trained rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.storage.step_log import encode_row, read_step_log
from support.runs import drawloom, write_corpus
from support.stores import damage

RECORD = ("record.use=data.record", "edit.trainer.phases.after.@forward_backward=@record")
RUN = ("run", "tiny.toml", *RECORD, "checkpoint.every=2", "evaluate.every=100", "trainer.on_finish=[]")
MIXTURE = (
    *("tokens.use=data.mixture", "packing.use=data.packing.best_fit", "packing.length=32"),
    *("metrics.sources.use=metrics.source_tokens", "batch.rows=@packing", "batch.micro_size=1"),
    *("batch.ramp=[{size=2,until_step=3}]", "data.lengths=[{length=8,until_tokens=500}]"),
)
BEGIN = (*MIXTURE, "tokens.sources.one={use='data.tokenized',path='one'}")
MORE = (*BEGIN, "tokens.sources.two={use='data.tokenized',path='two'}", "tokens.weights={one=1.0,two=3.0}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two token stores and a run: four steps on one store, then two ranks on both stores."""
    folder = tmp_path_factory.mktemp("audit")
    write_corpus(folder)
    for name, files in (("one", "corpus/part?.py"), ("two", "corpus/part1?.py")):
        [tokenized] = drawloom(folder, "tokenize", files, "--to", name)
        assert tokenized.code == 0, tokenized.text
    [first] = drawloom(folder, *RUN, *BEGIN, "trainer.steps=4")
    assert first.code == 0, first.text
    for outcome in drawloom(folder, *RUN, *MORE, "trainer.steps=30", "--accept-changes", ranks=2):
        assert outcome.code == 0, outcome.text
    return folder


def test_changed_mixture_weights_are_reported_and_need_a_flag(folder: Path) -> None:
    """`diff` names changed mixture weights, and a run with them is refused without --accept-changes."""
    changed = (*MORE, "tokens.weights.two=1.0")
    [diff] = drawloom(folder, "diff", "runs/tiny", "tiny.toml", *RUN[2:], *changed, "trainer.steps=30")
    assert "[tokens] weights: " in diff.text and "-> { one = 1.0, two = 1.0 }" in diff.text, diff.text
    [refused] = drawloom(folder, *RUN, *changed, "trainer.steps=31")
    assert refused.code == 2 and "[tokens] weights" in refused.text and "--accept-changes" in refused.text, refused.text


def test_tokens_are_counted_by_source(folder: Path) -> None:
    """After a resume, tokens are divided by the new weights, whatever the sources had before."""
    steps = read_lines(folder / "runs/tiny/metrics.jsonl")
    before, after = steps[3], steps[-1]
    assert "tokens/two" not in before and before["tokens/one"] > 250
    gained = {name: after[f"tokens/{name}"] - before.get(f"tokens/{name}", 0) for name in ("one", "two")}
    assert gained["two"] == pytest.approx(3 * gained["one"], rel=0.05)
    assert after["epochs/two"] > 2


def read_lines(path: Path) -> list[Any]:
    return [line.row for line in read_step_log(path)[0]]


def test_the_audit_passes_a_run_that_saw_its_planned_rows(folder: Path) -> None:
    """The audit passes a run with a resume on other ranks and weights, a batch ramp and a length curriculum."""
    [outcome] = drawloom(folder, "data", "audit", "runs/tiny")
    assert outcome.code == 0 and "30 steps: the data is what it should be" in outcome.text, outcome.text
    assert ": one has " in outcome.text and "; two has " in outcome.text and "6 times" in outcome.text


def duplicate_row(rows: list[Any]) -> None:
    """Replace a row of a step by a second copy of another row."""
    rows[11]["rows"][0] = rows[11]["rows"][1]


def drop_step(rows: list[Any]) -> None:
    """Delete a step."""
    del rows[7]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (duplicate_row, ["step 12: row ", "is missing", "is there too often"]),
        (drop_step, ["step 8: row ", "is missing"]),
    ],
)
def test_the_audit_names_a_planted_fault(folder: Path, change: Callable[[list[Any]], None], words: list[str]) -> None:
    """The audit names the step and the row of a duplicated row, and the missing step."""
    path = folder / "runs/tiny/rows/rank-0.jsonl"
    before = path.read_bytes()
    rows = read_lines(path)
    change(rows)
    path.write_bytes(b"".join(map(encode_row, rows)))
    [outcome] = drawloom(folder, "data", "audit", "runs/tiny")
    path.write_bytes(before)
    assert outcome.code == 1 and all(word in outcome.text for word in words), outcome.text
    assert "the data differs from what it should be" in outcome.text


def test_a_damaged_record_is_reported(folder: Path) -> None:
    """The audit reports changed lines as damage of the file and does not compare them with the data."""
    path = folder / "runs/tiny/rows/rank-0.jsonl"
    before = path.read_bytes()
    path.write_bytes(before.replace(b'"step": 7', b'"step": 6').replace(b'"step": 9', b'"step\0 9'))
    [outcome] = drawloom(folder, "data", "audit", "runs/tiny")
    path.write_bytes(before)
    assert outcome.code == 1, outcome.text
    assert "rank-0.jsonl is damaged: 1 line is unreadable (line 9), 1 line is out of order (line 7)" in outcome.text


@pytest.mark.parametrize("workers", [0, 2])
def test_a_changed_token_ends_a_run(tmp_path: Path, workers: int) -> None:
    """A run whose cached token store has a flipped bit trains no step and names the file."""
    write_corpus(tmp_path)
    words = ("run", "tiny.toml", "trainer.steps=1", "trainer.on_finish=[]", f"data.workers={workers}")
    [first] = drawloom(tmp_path, *words)
    assert first.code == 0, first.text
    [store] = (tmp_path / "runs/.tokens").glob("*-train")
    damage(store / "00000.tokens", 40)
    [outcome] = drawloom(tmp_path, *words, "run.name=other")
    assert outcome.code == 1 and f"{store.name}/00000.tokens has other content" in outcome.text, outcome.text
    assert "Traceback" not in outcome.text
    assert not (tmp_path / "runs/other/checkpoints/step-1").exists()
