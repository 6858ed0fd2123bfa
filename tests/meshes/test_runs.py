"""Whole runs on meshes, compared with the same run in one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import drawloom as api
from support.runs import drawloom, series, write_corpus

COMMON = ("run", "tiny.toml", "batch.micro_size=2", "checkpoint.every=5", "model.num_hidden_layers=2")
LEARNED = ("loss", "grad_norm", "validation_loss", "tokens")


@pytest.fixture(scope="module")
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, the tiny recipe, and its run in one process."""
    folder = tmp_path_factory.mktemp("meshes")
    write_corpus(folder)
    assert drawloom(folder, *COMMON, "run.name=one")[0].code == 0
    return folder


def load_export(run: Path) -> dict[str, Tensor]:
    """Return the tensors of a run's export, which has one file per pipeline rank."""
    return {name: part for file in (run / "export").glob("*.safetensors") for name, part in load_file(file).items()}


def assert_same(run: Path, other: Path) -> None:
    """Assert that losses and gradient norms agree to 1e-6, and exported weights to float32's rounding."""
    ours, theirs = series(run, *LEARNED), series(other, *LEARNED)
    assert len(ours) == len(theirs) == 10
    for mine, yours in zip(ours, theirs, strict=True):
        assert [value or 0 for value in mine] == pytest.approx([value or 0 for value in yours], rel=1e-6)
    weights, others = map(load_export, (run, other))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() < 1e-5, name


def test_ranks_without_validation_rows_join_evaluations(runs_folder: Path) -> None:
    """Evaluations with fewer rows than sharding ranks finish, and have one process's loss."""
    few = "validation.rows_used=1", "trainer.steps=2", "evaluate.every=1", "trainer.on_finish=[]"
    losses = []
    for name, ranks, again in (("few", 1, "false"), ("once", 2, "false"), ("again", 2, "true")):
        words = f"run.name={name}", f"mesh.data_shard={ranks}", f"stages.reshard_after_forward={again}"
        codes = drawloom(runs_folder, *COMMON, *few, *words, ranks=ranks)
        assert {outcome.code for outcome in codes} == {0}, codes
        losses.append([loss for (loss,) in series(runs_folder / "runs" / name, "validation_loss")])
    for meshed in losses[1:]:
        assert meshed == pytest.approx(losses[0], rel=1e-6)


def test_tensor_parallel_run_matches_one_process(runs_folder: Path) -> None:
    """
    Two tensor ranks, which share 257 bytes unevenly, times two sharding ranks have one process's losses, export and
    sample.
    """
    heads = ("model.num_key_value_heads=2",)
    sizes = ("mesh.tensor=2", "mesh.data_shard=2")
    for name, size, ranks in (("heads", (), 1), ("tensors", sizes, 4)):
        codes = drawloom(runs_folder, *COMMON, *heads, f"run.name={name}", *size, ranks=ranks)
        assert {outcome.code for outcome in codes} == {0}, codes
    assert_same(runs_folder / "runs/heads", runs_folder / "runs/tensors")
    assert (runs_folder / "runs/heads/sample.txt").read_text() == (runs_folder / "runs/tensors/sample.txt").read_text()


EXPERTS = """
extends = "./tiny.toml"

[model]
use = "model.qwen3.moe"
num_hidden_layers = 2
hidden_size = 16
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 8
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 16
"""
SYMMETRIC = '[stages]\ndispatcher = { use = "experts.symmetric" }\n'


def test_expert_parallel_run_matches_one_process(runs_folder: Path) -> None:
    """
    Two ranks with half of the experts have one process's losses, export and sample.

    Their dispatcher is the default one.
    """
    (runs_folder / "experts.toml").write_text(EXPERTS, "utf-8")
    common = ("run", "experts.toml", *COMMON[2:4])
    for name, ranks in (("all", 1), ("halves", 2)):
        words = (f"run.name={name}", f"mesh.data_shard={ranks}", f"mesh.expert={ranks}")
        codes = drawloom(runs_folder, *common, *words, ranks=ranks)
        assert {outcome.code for outcome in codes} == {0}, codes
        assert ("experts.all_to_all between 2 ranks" in codes[0].text) == (ranks == 2)
    one, run = runs_folder / "runs/all", runs_folder / "runs/halves"
    assert_same(one, run)
    assert (one / "sample.txt").read_text() == (run / "sample.txt").read_text()


def test_sample_after_kill_equals_uninterrupted_sample(runs_folder: Path) -> None:
    """A restarted run with only the sample missing samples the same text, also with experts in shared memory."""
    (runs_folder / "shared.toml").write_text(EXPERTS + SYMMETRIC, "utf-8")
    words = ("run", "shared.toml", *COMMON[2:4], "mesh.data_shard=2", "mesh.expert=2", "sample.tokens=60")
    texts = []
    for _ in range(2):
        codes = drawloom(runs_folder, *words, "run.name=shared", ranks=2)
        assert {outcome.code for outcome in codes} == {0}, codes
        texts.append((runs_folder / "runs/shared/sample.txt").read_bytes())
        (runs_folder / "runs/shared/sample.txt").unlink()
    assert texts[0] == texts[1] and b"experts.symmetric" not in texts[0]


def test_uneven_routing_repeats_steps_bitwise(runs_folder: Path) -> None:
    """With room for balanced experts only, numbers, expert loads and weights equal a run's with enough room."""
    (runs_folder / "uneven.toml").write_text(EXPERTS + SYMMETRIC, "utf-8")
    words = (
        *("run", "uneven.toml", *COMMON[2:4], "mesh.data_shard=2", "mesh.expert=2", "trainer.steps=3"),
        *("metrics.load.use=metrics.expert_load", "metrics.load.by_expert=true"),
    )
    names = (*LEARNED, *(f"expert_tokens/{layer}/{expert}" for layer in range(2) for expert in range(4)))
    for name, capacity in (("narrow", 1.0), ("wide", 4.0)):
        codes = drawloom(runs_folder, *words, f"run.name={name}", f"stages.dispatcher.capacity={capacity}", ranks=2)
        assert {outcome.code for outcome in codes} == {0}, codes
    narrow, wide = runs_folder / "runs/narrow", runs_folder / "runs/wide"
    assert series(narrow, *names) == series(wide, *names) and len(series(wide, *names)) == 3
    weights, others = map(load_export, (narrow, wide))
    assert weights and all(torch.equal(weight, others[name]) for name, weight in weights.items())
    log = "".join(path.read_text("utf-8") for path in (runs_folder / "runs/narrow/log").iterdir())
    assert "the step is repeated with room for" in log


def test_explain_and_draw_say_how_ranks_share_the_parameters() -> None:
    """Every mesh dimension that divides parameters has a line, on any machine."""
    sizes = ("mesh.pipeline=2", "mesh.tensor=2", "mesh.data_shard=4", "batch.micro_size=4")
    recipe = api.Recipe.load("first_run", *sizes)
    for line in (
        "layers: partitioned over 2 pipeline ranks",
        "split over 2 ranks, and tokens in between",
        "sharded over 4 ranks; weights are gathered once a step",
    ):
        assert line in recipe.explain("stages") and line in recipe.draw(focus="stages")
    words = ("mesh.tensor=2", "mesh.data_shard=4", "mesh.expert=2", "batch.micro_size=4", "model.vocab_size=320")
    text = api.Recipe.load("moe", *words).explain("stages")
    assert "experts: partitioned over 2 ranks, and sharded over 4" in text
    assert "ranks" not in api.Recipe.load("first_run").explain("stages").partition("used by")[0]


def test_export_after_sample_has_float32_master_weights(runs_folder: Path) -> None:
    """An export contains the float32 slices, although a forward pass leaves weights gathered in the compute dtype."""
    last = ("trainer.steps=2", 'trainer.on_finish=["@sample", "@export"]', "precision.compute=bfloat16")
    codes = drawloom(runs_folder, *COMMON, *last, "run.name=sampled", "mesh.data_shard=2", ranks=2)
    assert {outcome.code for outcome in codes} == {0}, codes
    assert {tensor.dtype for tensor in load_export(runs_folder / "runs/sampled").values()} == {torch.float32}


def test_stochastic_rounding_has_the_same_noise_on_shards(runs_folder: Path) -> None:
    """Fewer than 2% of stochastically rounded bfloat16 weights differ between one process and two sharding ranks."""
    rounded = (
        "optimizer.use=optim.stochastic_adamw",
        "optimizer.lr=1e-3",
        "precision.parameter=bfloat16",
        "trainer.steps=3",
    )
    exports = []
    for name, ranks in (("noise of one", 1), ("noise of two", 2)):
        codes = drawloom(runs_folder, *COMMON, *rounded, f"run.name={name}", f"mesh.data_shard={ranks}", ranks=ranks)
        assert {outcome.code for outcome in codes} == {0}, codes
        exports.append(load_export(runs_folder / f"runs/{name}"))
    for name, weight in exports[0].items():
        # Gradients differ in their last bits, so that a few elements are rounded differently.
        assert (weight != exports[1][name]).float().mean() < 0.02, name
