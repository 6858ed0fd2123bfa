"""Runs on user-defined batches: the image classifier of docs/components.md, on one process and on meshes."""

from pathlib import Path

import pytest

from support.blocks import ROOT, blocks
from support.runs import drawloom, series

PAGE = ROOT / "docs" / "components.md"
COMMON = ("run", "images.toml", "--import", "my_lab", "trainer.steps=6", "evaluate.every=3", "device.share=true")
LEARNED = ("loss", "grad_norm", "accuracy", "validation_loss", "tokens")
LAYOUTS = {
    "one": (1, ("mesh.pipeline=1", "data.workers=0")),
    "stages": (2, ("mesh.pipeline=2", "data.workers=2", "batch.micro_size=4")),
    "replicas": (2, ("mesh.pipeline=1", "mesh.data_replicate=2", "data.workers=1")),
}


@pytest.mark.soak
def test_a_classifier_of_images_learns_the_same_on_every_mesh(tmp_path: Path) -> None:
    """Stages, replicas, workers and smaller microbatches give the losses, norms and accuracies of one process."""
    for block in blocks(PAGE):
        if block.title.startswith("my_lab/") or block.title == "images.toml":
            (tmp_path / block.title).parent.mkdir(exist_ok=True)
            (tmp_path / block.title).write_text(block.text, "utf-8")
    learned = {}
    for name, (ranks, words) in LAYOUTS.items():
        outcomes = drawloom(tmp_path, *COMMON, f"run.name={name}", *words, ranks=ranks, path=str(tmp_path))
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        learned[name] = series(tmp_path / "runs" / name, *LEARNED)
    assert len(learned["one"]) == 6 and learned["one"][-1][0] < learned["one"][0][0]
    for name in ("stages", "replicas"):
        for ours, theirs in zip(learned["one"], learned[name], strict=True):
            assert [value or 0 for value in theirs] == pytest.approx([value or 0 for value in ours], rel=1e-5), name
