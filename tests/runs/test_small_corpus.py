"""Runs on very little text."""

from pathlib import Path

import pytest

from support.runs import drawloom, series, write_corpus

RUN = ("run", "tiny.toml", "trainer.steps=2", "evaluate.every=1")


@pytest.mark.parametrize("files", [1, 4])
def test_a_corpus_may_be_a_few_files(tmp_path: Path, files: int) -> None:
    """A run on one file or a few trains and evaluates with the usual validation fraction."""
    write_corpus(tmp_path, files=files, lines=40)
    [done] = drawloom(tmp_path, *RUN, "corpus.validation_fraction=0.05")
    assert done.code == 0, done.text
    assert all(loss is not None for (loss,) in series(tmp_path / "runs/tiny", "validation_loss"))


def test_a_fraction_of_0_means_no_evaluation(tmp_path: Path) -> None:
    """A run with a validation fraction of 0 reports it and trains without a validation loss."""
    write_corpus(tmp_path, files=1, lines=40)
    [done] = drawloom(tmp_path, *RUN, "corpus.validation_fraction=0.0")
    assert done.code == 0 and "there is no evaluation" in done.text, done.text
    assert series(tmp_path / "runs/tiny", "validation_loss") == [(None,), (None,)]
