"""Class counts summed by a loss, on one process and on several."""

from pathlib import Path
from typing import Any

import pytest
import torch

from drawloom.components.loss.next_token import NextToken
from drawloom.components.metrics.class_counts import confusion_matrix, score_histogram
from support.processes import run_ranks
from support.runs import Outcome, command, rows, write_corpus

WORDS = (
    "metrics.letters.use=metrics.classification",
    "metrics.letters.classes=5",
    "metrics.letters.averages=['macro', 'per_class']",
    "metrics.auroc.use=metrics.auroc",
    "metrics.auroc.bins=50",
    "trainer.on_finish=[]",
    "trainer.steps=3",
    "model.num_hidden_layers=2",
)


def _run_with_counts(folder: Path, arguments: Any) -> Outcome:
    """Run with a loss that classifies four groups of bytes and the end token, and scores the first group."""

    def counts(self: Any, hidden: Any, head: Any, batch: Any) -> Any:
        total, weight, sums = plain(self, hidden, head, batch)
        with torch.no_grad():
            chances = head.logits(hidden)[..., :256].float().softmax(-1).unflatten(-1, (4, 64)).sum(-1)
            targets = batch.targets // 64
            sums["confusion"] = confusion_matrix(chances.argmax(-1), targets, 5, batch.weights)
            sums["score_histogram"] = score_histogram(
                (50 * (chances[..., 0] - 0.25)).sigmoid(), targets == 0, 50, batch.weights
            )
        return total, weight, sums

    plain = NextToken.loss
    NextToken.loss = counts  # type: ignore[method-assign]
    return command(folder, arguments, None)


def test_every_layout_has_the_scores_of_one_process(tmp_path: Path) -> None:
    """Replicas, stages and smaller microbatches have the counts of one process; classes without items are None."""
    write_corpus(tmp_path)
    layouts = {
        "one": (1, ()),
        "replicas": (2, ("batch.micro_size=2",)),
        "stages": (2, ("batch.micro_size=1", "mesh.pipeline=2")),
    }
    scores = {}
    for name, (ranks, words) in layouts.items():
        arguments = ("run", "tiny.toml", f"run.name={name}", *WORDS, *words)
        outcomes = run_ranks(_run_with_counts, ranks, tmp_path, arguments, timeout=120, variables=ranks > 1)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        scores[name] = [
            {key: value for key, value in row.items() if key.partition("/")[0] in ("accuracy", "auroc", "recall", "f1")}
            for row in rows(tmp_path / "runs" / name)
        ]
    for name in ("replicas", "stages"):
        for one, other in zip(scores["one"], scores[name], strict=True):
            # as -1: pytest.approx does not accept None
            known = [{key: -1 if value is None else value for key, value in row.items()} for row in (one, other)]
            assert known[1] == pytest.approx(known[0], rel=1e-3, abs=1e-3), name
    assert 0 < scores["one"][-1]["auroc"] < 1 and scores["one"][-1]["f1/3"] is None
