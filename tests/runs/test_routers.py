"""Routers in runs: on one process and on several, and after a kill."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from support.runs import deterministic_rows, drawloom, take_back, write_corpus

BIAS = "e_score_correction_bias"
POSITIONS = 4 * 32
"""Positions in a step's rows, by tiny.toml."""

RECIPE = """
extends = "./tiny.toml"

[model]
use = "model.dots1"
num_hidden_layers = 3
hidden_size = 16
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 8
intermediate_size = 32
vocabulary_multiple = 2
tie_word_embeddings = true
num_experts = 8
num_experts_per_tok = 2
moe_intermediate_size = 16
first_k_dense_replace = 1
n_group = 2
topk_group = 1
router_z_loss_coef = 1e-2
router_aux_loss_coef = 1e-2

[precision]
parameter = "float64"

[router_bias]
use = "phases.router_bias"
update_rate = 0.02

[edit.trainer.phases]
after."@optimizer" = "@router_bias"

[metrics.experts]
use = "metrics.expert_load"
by_expert = true

[batch]
micro_size = 2

[checkpoint]
every = 3

[trainer]
steps = 6
"""
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "stages that recompute": (
        2,
        (
            "mesh.pipeline=2",
            "schedule.use=pipeline.schedules.zero_bubble_1p",
            "schedule.stages_per_rank=1",
            "stages.recompute=blocks",
        ),
    ),
    "experts of replicas": (
        2,
        ("mesh.expert=2", "dispatcher.use=experts.all_to_all", "stages.dispatcher=@dispatcher"),
    ),
    "layers outside of stages": (
        2,
        (
            "mesh.pipeline=2",
            "executor.use=pipeline.circular.executor",
            "schedule.use=pipeline.schedules.circular",
            "schedule.stages_per_rank=1",
            "schedule.pipeline_parallel_layers=2",
        ),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the recipe and its run on one process."""
    folder = tmp_path_factory.mktemp("routers")
    write_corpus(folder)
    (folder / "routers.toml").write_text(RECIPE, "utf-8")
    outcome = drawloom(folder, "run", "routers.toml", "run.name=one")[0]
    assert outcome.code == 0, outcome.text
    return folder


def read_biases(run: Path) -> dict[str, Tensor]:
    """Return the biases of all routers in the export, by name."""
    source = open_safetensors_folder(run / "export")
    return {name: source.tensor(name) for name in source.specs() if name.endswith(BIAS)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_biases_of_one_process(layout: str, folder: Path) -> None:
    """Biases are bitwise equal, and losses, entropies and token counts equal one process's."""
    ranks, words = LAYOUTS[layout]
    name = layout.replace(" ", "_")
    outcomes = drawloom(folder, "run", "routers.toml", f"run.name={name}", *words, ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
    ours, theirs = read_biases(folder / "runs" / name), read_biases(folder / "runs/one")
    assert ours.keys() == theirs.keys() == {f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (1, 2)}
    assert all(ours[name].equal(bias) and len(set(bias.tolist())) > 2 for name, bias in theirs.items())
    for one, other in zip(
        deterministic_rows(folder / "runs/one"), deterministic_rows(folder / "runs" / name), strict=True
    ):
        assert other == pytest.approx(one, rel=1e-9)


def test_no_token_is_dropped(folder: Path) -> None:
    """In every step and layer, expert token counts add up to two per token; padding does not count."""
    steps = deterministic_rows(folder / "runs/one")
    for row, before in zip(steps, [{"tokens": 0}, *steps], strict=False):
        tokens = row["tokens"] - before["tokens"]
        assert tokens <= POSITIONS
        for layer in (1, 2):
            sent = [value for name, value in row.items() if name.startswith(f"expert_tokens/{layer}/")]
            assert len(sent) == 8 and sum(sent) == 2 * tokens
            assert row[f"expert_imbalance/{layer}"] == pytest.approx(max(sent) / (sum(sent) / 8))


def test_a_resumed_run_has_the_same_bits(folder: Path) -> None:
    """A run resumed after step 3 has the metrics and biases of the uninterrupted run."""
    for steps in (3, 6):
        assert drawloom(folder, "run", "routers.toml", "run.name=resumed")[0].code == 0
        if steps == 3:
            take_back(folder / "runs/resumed", 3)
    assert deterministic_rows(folder / "runs/resumed") == deterministic_rows(folder / "runs/one")
    ours, theirs = read_biases(folder / "runs/resumed"), read_biases(folder / "runs/one")
    assert ours and all(ours[name].equal(bias) for name, bias in theirs.items())


ADAPTED = """
extends = "./routers.toml"

[stages]
adapters = ["@lora", "@gate"]

[lora]
use = "adapters.lora"
targets = ["q_proj"]
rank = 2
alpha = 4.0

[gate]
use = "adapters.full_tuning"
targets = ["layers.2.mlp.gate"]

[adapter]
use = "export.adapter"

[trainer]
steps = 5  # random routers swing: after an even number the biases are back at zero
on_finish = ["@export", "@adapter"]
"""


def test_an_adapter_has_all_changed_biases(folder: Path) -> None:
    """The adapter has the fully tuned router's biases; the frozen router keeps zeros in the merged export."""
    (folder / "adapted.toml").write_text(ADAPTED, "utf-8")
    outcome = drawloom(folder, "run", "adapted.toml", "run.name=adapted")[0]
    assert outcome.code == 0, outcome.text
    merged = read_biases(folder / "runs/adapted")
    changed = {name: bias for name, bias in merged.items() if bias.any()}
    assert len(merged) == 2 and len(changed) == 1
    adapter = load_file(folder / "runs/adapted/adapter/adapter_model.safetensors")
    assert [name for name in adapter if name.endswith(BIAS)] == [f"base_model.model.{name}" for name in changed]
    assert all(adapter[f"base_model.model.{name}"].equal(bias) for name, bias in changed.items())
    words = ("run.name=frozen", 'stages.adapters=["@lora"]')
    outcome = drawloom(folder, "run", "adapted.toml", *words)[0]
    assert outcome.code == 2 and "the adapters freeze every router" in outcome.text
