"""The language model in docs/components.md on several ranks."""

from pathlib import Path

import pytest

from support.blocks import ROOT, blocks
from support.runs import drawloom, series, write_corpus

SMALL = ("model.width=16", "model.heads=2", "vars.length=32", "trainer.steps=3", "sample.tokens=4", "data.workers=0")
FILES = ("corpus.use=data.text_files", 'corpus.paths=["corpus/*.py"]', "corpus.validation_fraction=0.2")
FLOAT64 = ("precision.parameter=float64", "precision.reduce=float64", "lr.phases=[{ to = 1.0 }]")
MESHES = {"one": (1, 1, 1), "sharded and pipelined": (4, 2, 2)}
"""Ranks, and ranks along `data_shard` and `pipeline`."""


@pytest.mark.soak
def test_the_model_computes_the_same_on_every_mesh(tmp_path: Path) -> None:
    """Losses and gradient norms on 2 pipeline ranks times 2 shards equal one process's."""
    write_corpus(tmp_path)
    for block in blocks(ROOT / "docs" / "components.md"):
        if "parallel_lm." in block.title and "test" not in block.title:
            (tmp_path / block.title).parent.mkdir(exist_ok=True)
            (tmp_path / block.title).write_text(block.text, "utf-8")
    steps = {}
    for name, (ranks, shards, stages) in MESHES.items():
        mesh = (f"mesh.data_shard={shards}", f"mesh.pipeline={stages}", f"run.name={name.split()[0]}")
        words = ("parallel_lm.toml", "--import", "my_lab", *SMALL, *FILES, *FLOAT64, *mesh)
        outcomes = drawloom(tmp_path, "run", *words, ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        steps[name] = series(tmp_path / "runs" / name.split()[0], "loss", "grad_norm")
    assert len(steps["one"]) == 3
    for one, other in zip(*steps.values(), strict=True):
        assert one == pytest.approx(other, rel=1e-9)
