"""Metrics of runs on one process and on several."""

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.runs import deterministic_rows, drawloom, write_corpus

RECIPE = """
extends = "./tiny.toml"

[model]
num_hidden_layers = 2
num_key_value_heads = 2

[loss]
z_loss = 1e-3
accuracy = true

[metrics.z_loss]
use = "metrics.mean"
of = "z_loss"

[metrics.train]
use = "metrics.group"
prefix = "train/"
members = [
    { use = "metrics.mean", of = "accuracy" },
    { use = "metrics.mean", of = "accuracy", per = "microbatch", name = "accuracy_by_microbatch" },
    { use = "metrics.perplexity" },
    { use = "metrics.bits_per_byte" },
    { use = "metrics.spread", quantiles = [0.5] },
]

[metrics.layers]
use = "metrics.layer_norms"

[metrics.histograms]
use = "metrics.histograms"
targets = ["*.weight"]
every = 1

[trackers.tensorboard]
use = "trackers.tensorboard"

[metrics.activations]
use = "metrics.activation_rms"

[trainer]
steps = 2
on_finish = []
phases = [
    "@forward_backward",
    "@sync_gradients",
    "@clip",
    "@metrics.layers",
    "@metrics.histograms",
    "@lr",
    "@optimizer",
    "@evaluate",
    "@report",
    "@checkpoint",
]

[vars]
length = 30

[batch]
micro_size = 1
"""


def read_histograms(folder: Path) -> dict[str, Any]:
    """Return the histograms of the first step as TensorBoard reads them, by name."""
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"histograms": 0}).Reload()
    return {name: events.Histograms(name)[0].histogram_value for name in events.Tags()["histograms"]}


def test_every_layout_has_the_metrics_of_one_process(tmp_path: Path) -> None:
    """
    Replicas, stages, and ranks that share rows and matrices have the metrics of one process in every step.

    The token count is not divisible by the ranks that share matrices. Layer norms add up to the whole norm. Weight
    histograms of the first step are equal to the last element, and gradient histograms count all elements.
    """
    write_corpus(tmp_path)
    (tmp_path / "metrics.toml").write_text(RECIPE, "utf-8")
    layouts: dict[str, tuple[int, tuple[str, ...]]] = {
        "one": (1, ()),
        "replicas": (2, ()),
        "stages": (2, ("mesh.pipeline=2",)),
        "shared": (4, ("mesh.context=2", "mesh.tensor=2")),
    }
    metrics, histograms = {}, {}
    for name, (ranks, words) in layouts.items():
        outcomes = drawloom(tmp_path, "run", "metrics.toml", f"run.name={name}", *words, ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        metrics[name] = deterministic_rows(tmp_path / "runs" / name)
        histograms[name] = read_histograms(tmp_path / "runs" / name)
    names = {
        "z_loss",
        "train/accuracy",
        "train/perplexity",
        "train/loss_p50",
        "train/bits_per_byte",
        "grad_norm/0",
        "activation_rms/1",
        "weight_norm/1",
    }
    assert names <= set(metrics["one"][0])
    for name in list(layouts)[1:]:
        for one, other in zip(metrics["one"], metrics[name], strict=True):
            assert other == pytest.approx(one, rel=1e-4, abs=1e-6), name
        assert histograms[name].keys() == histograms["one"].keys()
        for key, histogram in histograms["one"].items():
            other = histograms[name][key]
            assert other.num == histogram.num == sum(histogram.bucket) > 0
            assert other.max == pytest.approx(histogram.max, rel=1e-4)
            if key.startswith("weights/"):
                assert list(other.bucket) == list(histogram.bucket), (name, key)
    for row in metrics["one"]:
        parts = [value for key, value in row.items() if key.startswith("grad_norm/")]
        assert sum(part**2 for part in parts) ** 0.5 == pytest.approx(min(1.0, row["grad_norm"]), rel=1e-4)


def test_a_misspelt_sum_ends_the_run_in_words(tmp_path: Path) -> None:
    """The first step ends the run and lists the sums of the loss, without a traceback."""
    write_corpus(tmp_path)
    words = ("metrics.extra.use=metrics.mean", "metrics.extra.of=zloss", "trainer.on_finish=[]")
    [outcome] = drawloom(tmp_path, "run", "tiny.toml", *words)
    assert outcome.code == 2 and "no sum called 'zloss'" in outcome.text and "cross_entropy" in outcome.text
    assert "Traceback" not in outcome.text
