"""Recipes that come with drawloom."""

from pathlib import Path

import pytest
import torch

from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.planning.plan import plan
from drawloom.components.ports.model import LayerRange
from drawloom.graph.project import Project, Recipe
from support.chat import tokenizer_folder

ROOT = Path(__file__).parents[2]
PROJECT = Project.from_package("drawloom")
OVERLAYS = [path.stem for path in (ROOT / "recipes/overlays").glob("*.toml")]
FROM_A_BASE = [
    "finetune",
    "finetune_lora",
    "chat",
    "dpo",
    "grpo",
    "tools",
    "kto",
    "reward",
    "classify",
    "distill",
    "distill_offline",
    "heal",
]
PARAMETERS = {
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "qwen3_30b_a3b": 30_532_122_624,
    "llama3_8b": 8_030_261_248,
    "llama3_8b_one_gpu": 8_030_261_248,
    "qwen2_5_14b_one_gpu": 14_770_033_664,
    "qwen3_30b_a3b_lora": 30_532_122_624,
}
"""Parameter counts published with the models."""
ONE_GPU = ("llama3_8b_one_gpu", "qwen2_5_14b_one_gpu", "qwen3_30b_a3b_lora")
NAMED_GPUS = {"qwen3_0_6b": 1, "qwen3_8b": 8, "qwen3_30b_a3b": 16, "llama3_8b": 8, **dict.fromkeys(ONE_GPU, 1)}
"""Number of 80 GB GPUs in the recipe's first lines."""
PARTS = (*OVERLAYS, *FROM_A_BASE, *PARAMETERS, "pretrain", "pretrain_tokenized")
WHOLE = [path.stem for path in (ROOT / "recipes").rglob("*.toml") if path.stem not in PARTS]

SWAPS = [
    ["clip.use=gradients.clip_value", "clip.max_value=0.1"],
    ['lr.phases=[{ to = 1.0, until_percent = 5.0 }, { to = 0.0, curve = "linear" }]'],
    ["optimizer.use=optim.sgd", "optimizer.lr=0.5"],
    ["kernels.rms_norm=eager"],
    ["--overlay", "with_aim"],
    ["--overlay", "with_tensorboard"],
]


def problems(recipe: str, *words: str, overlays: tuple[str, ...] = ()) -> list[str]:
    """Return all problems from `check`, including warnings."""
    return [str(problem) for problem in PROJECT.graph(PROJECT.load(recipe, overlays, words)).problems]


@pytest.mark.parametrize("recipe", WHOLE)
def test_shipped_recipes_have_no_problems(recipe: str) -> None:
    """Shipped recipes have neither errors nor warnings."""
    assert problems(recipe) == []


@pytest.mark.parametrize("recipe", PARAMETERS)
def test_recipes_of_known_models_have_their_sizes(recipe: str, tmp_path: Path) -> None:
    """With a store and a tokenizer there is no problem, and the model has the published parameter count."""
    words = (f"vars.data={tmp_path / 'store'}", f"vars.tokenizer={tokenizer_folder(tmp_path / 'tokenizer')}")
    assert problems(recipe, *words) == []
    assert len(problems(recipe)) == 2  # one for the store, one for the tokenizer
    with Recipe.load(recipe, *words).open(only="model") as objects, torch.device("meta"):
        model = objects["model"]
        module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[recipe]


@pytest.mark.parametrize(("recipe", "ranks"), NAMED_GPUS.items())
def test_recipes_of_known_models_fit_the_gpus_that_they_name(recipe: str, ranks: int) -> None:
    """The plan fits on the number of 80 GB GPUs that the recipe names."""
    planned = plan(Recipe.load(recipe, "vars.data=store", "vars.tokenizer=folder"), find_device_model("h100"), ranks)
    assert planned.fits, max(planned.peak_memory_bytes)


LORA = ("lora={use='adapters.lora', targets=['*_proj'], rank=4, alpha=8.0}", "stages.adapters=['@lora']")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays_fit_the_first_run(overlay: str) -> None:
    """Every shipped overlay over first_run, with LoRA if it changes frozen weights, has no problem."""
    # These are for other recipes: tests/runs/test_preferences.py, test_rollouts.py and test_replayed_routes.py.
    if overlay not in ("with_all_weights_and_reference", "with_replayed_routes", "with_shared_prefixes"):
        assert problems("first_run", *LORA * (overlay == "with_nf4"), overlays=(overlay,)) == []


@pytest.mark.parametrize("words", [swap for swap in SWAPS if "--overlay" not in swap], ids=lambda words: words[0])
def test_the_swaps_of_the_readme_fit(words: list[str]) -> None:
    """One-line changes from the README are in its text, and result in valid recipes."""
    assert problems("first_run", *words) == []
    assert all(word.partition("=")[2].strip("[]{} ") for word in words)
    assert words[0].partition("=")[2] in (ROOT / "README.md").read_text("utf-8") or words[0].startswith("lr.")


@pytest.mark.parametrize("steps", [1, 2, 3, 1000])
def test_any_number_of_steps_is_valid(steps: int) -> None:
    """Shipped recipes stay valid for shorter runs."""
    assert problems("first_run", f"trainer.steps={steps}") == []


@pytest.mark.parametrize(
    ("setting", "limit"),
    [
        ("model.num_hidden_layers", 10_000),
        ("model.vocab_size", 2**31),
        ("model.num_attention_heads", 100_000),
        ("mesh.pipeline", 1024),
        ("mesh.data_shard", 2**20),
        ("mesh.data_replicate", 2**20),
        ("batch.global_size", 1_000_000),
        ("batch.micro_size", 1_000_000),
        ("packing.length", None),
        ("data.workers", 1000),
        ("device.threads", 10_000),
    ],
)
def test_sizes_beyond_any_machine_are_problems(setting: str, limit: int | None) -> None:
    """`check` rejects huge sizes with a message instead of allocating."""
    [problem] = [text for text in problems("first_run", f"{setting}=1000000000000") if "DL303" in text]
    name = setting.partition(".")[2]
    expected = (
        "a row of 1000000000000 tokens is longer than" if limit is None else f"1000000000000 is more than {limit}"
    )
    assert f"{name}: {expected}" in problem


def test_mesh_with_too_many_ranks_is_a_problem() -> None:
    """Mesh sizes whose product is too large are rejected, although every single size is allowed."""
    words = "mesh.data_shard=1000000", "mesh.tensor=4", "batch.global_size=1000000", "batch.micro_size=1"
    [problem] = [text for text in problems("first_run", *words) if "[mesh] the mesh has" in text]
    assert "the mesh has 4000000 ranks, which is more than 1048576" in problem
