"""Who looks for something by the obvious word finds its file at the first try."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for name in ("graph", "components", "kernels") for path in (ROOT / name).rglob("*.py")]
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8").lower() for path in SOURCES}

QUESTIONS = {
    "where are expired checkpoints removed?": ("retention", "components/checkpoint/retention.py"),
    "what is a corrupt checkpoint?": ("corrupt", "components/checkpoint/manifest.py"),
    "where is the auxiliary loss of the router?": ("aux_loss", "components/model/decoder/experts.py"),
    "where is the hidden size of a model set?": ("hidden_size: int", "components/model/decoder/builder.py"),
    "where is the deterministic mode?": ("deterministic", "components/run/randomness.py"),
    "where is a dependency cycle found?": ("cycle", "graph/wiring/graph.py"),
    "where are point-to-point communicators made?": ("communicator", "components/distributed/p2p_links.py"),
    "where is the reason of a hang found?": ("hang", "components/distributed/hang_diagnosis.py"),
    "where are gradients clipped by norm?": ("max_norm", "components/gradients/clip_norm.py"),
    "where is weight decay applied to some parameters only?": ("decays", "components/optim/parameter_groups.py"),
    "where is 1F1B?": ("1f1b", "components/pipeline/schedules/one_f_one_b.py"),
    "where are zero-bubble weight gradients deferred?": ("deferred", "kernels/deferred_grads.py"),
    "where is the bubble of a schedule simulated?": ("simulat", "components/pipeline/simulation/simulator.py"),
    "where are layers split over stages?": ("partition", "components/parallel/pipeline.py"),
    "where is the lock of the recipe?": ("lockfile", "graph/recipe/lockfile.py"),
    "where is an override of the command line read?": ("override", "graph/recipe/overrides.py"),
    "where is RoPE scaled?": ("rope_scaling", "components/model/decoder/rope.py"),
    "where are documents packed into rows?": ("pack", "components/data/packing/packed_rows.py"),
    "where are initial weights drawn?": ("splitmix", "components/distributed/rng.py"),
    "where is the cosine learning rate?": ("cosine", "components/learning_rate/piecewise.py"),
}
FEW = 8
"""How many files one looks through, those first in which the word stands most often."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_obvious_word_leads_to_the_file(question: str) -> None:
    """The file is among the few in whose name the word stands, or which have the word most often."""
    word, wanted = QUESTIONS[question]
    counts = {path: len(re.findall(re.escape(word), text)) + 1000 * (word in path) for path, text in TEXTS.items()}
    found = sorted((path for path, count in counts.items() if count), key=lambda path: -counts[path])
    assert wanted in found[:FEW], found[:FEW]
