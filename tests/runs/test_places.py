"""Errors while a run opens are placed where the wrong value is written."""

import re
from pathlib import Path

import pytest

from support.runs import drawloom, write_corpus


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (['corpus.paths=["none/*"]'], 'command line: [corpus] paths: no file matches "none/*"'),
        (["stages.weights=nowhere"], "command line: [stages] weights: "),
        ([], 'mine.toml:4:9: [corpus] paths: no file matches "gone/*"'),
    ],
)
def test_faults_of_a_corpus_and_of_weights_are_not_placed_in_a_shipped_recipe(
    tmp_path: Path, words: list[str], printed: str, ranks: int
) -> None:
    """The error names the user's recipe or the command line, and no run folder is left."""
    write_corpus(tmp_path)
    (tmp_path / "mine.toml").write_text('extends = "tiny.toml"\n\n[corpus]\npaths = ["gone/*"]\n', "utf-8")
    recipe = "tiny.toml" if words else "mine.toml"
    runs = drawloom(tmp_path, "run", recipe, "batch.micro_size=2", *words, ranks=ranks)
    assert all(run.code for run in runs)
    # A rank that fails alone names itself.
    text = "".join(run.text for run in runs)
    assert re.match(f"(rank [01]: )?{re.escape(printed)}", text), text
    assert not list((tmp_path / "runs").glob("[!.]*"))


def test_a_refused_run_keeps_an_existing_folder(tmp_path: Path) -> None:
    """A refused run removes only its own files, and notes in the folder stay."""
    write_corpus(tmp_path)
    notes = tmp_path / "runs" / "here" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("keep", "utf-8")
    (run,) = drawloom(tmp_path, "run", "tiny.toml", "run.name=here", 'corpus.paths=["none/*"]')
    assert run.code != 0 and notes.read_text("utf-8") == "keep"
