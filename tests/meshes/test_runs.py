"""Whole runs on meshes, against the same run in one process."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import drawloom as api
from support.runs import drawloom, series, take_back, write_corpus

COMMON = ("run", "tiny.toml", "batch.micro_size=2", "checkpoint.every=5", "model.num_hidden_layers=2")
LEARNED = ("loss", "grad_norm", "validation_loss", "tokens")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a corpus, the tiny recipe, and a run of it on one process."""
    folder = tmp_path_factory.mktemp("meshes")
    write_corpus(folder)
    assert drawloom(folder, *COMMON, "run.name=one")[0].code == 0
    return folder


def exported(run: Path) -> dict[str, Tensor]:
    """The tensors of a run's export, which pipeline ranks write as a file each."""
    return {name: part for file in (run / "export").glob("*.safetensors") for name, part in load_file(file).items()}


def assert_same(run: Path, other: Path) -> None:
    """Losses and gradient norms of every step are equal to 1e-6 relative; weights of exports to float32's rounding."""
    ours, theirs = series(run, *LEARNED), series(other, *LEARNED)
    assert len(ours) == len(theirs) == 10
    for mine, yours in zip(ours, theirs, strict=True):
        assert [value or 0 for value in mine] == pytest.approx([value or 0 for value in yours], rel=1e-6)
    weights, others = map(exported, (run, other))
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() < 1e-5, name


def test_a_sharded_run_resumes_on_one_process_and_on_a_sharded_pipeline(place: Path) -> None:
    """Trained on two ranks that shard, then on one, then on a pipeline of shards: the losses of one process."""
    codes = drawloom(place, *COMMON, "run.name=moved", "mesh.data_shard=2", ranks=2)
    assert [outcome.code for outcome in codes] == [0, 0], codes
    run = place / "runs/moved"
    assert_same(place / "runs/one", run)
    assert (run / "sample.txt").exists()
    for sizes, ranks in ((("mesh.data_shard=1",), 1), (("mesh.pipeline=2", "mesh.data_shard=2"), 4)):
        take_back(run, 5)
        codes = drawloom(place, *COMMON, "run.name=moved", *sizes, ranks=ranks)
        assert {outcome.code for outcome in codes} == {0}, codes
        assert_same(place / "runs/one", run)


def test_ranks_without_validation_rows_take_part_in_an_evaluation(place: Path) -> None:
    """With fewer rows than ranks that shard, evaluations end, and have the loss of one process."""
    few = "validation.rows_used=1", "trainer.steps=2", "evaluate.every=1", "trainer.on_finish=[]"
    found = []
    for name, ranks, again in (("few", 1, "false"), ("once", 2, "false"), ("again", 2, "true")):
        words = f"run.name={name}", f"mesh.data_shard={ranks}", f"stages.reshard_after_forward={again}"
        codes = drawloom(place, *COMMON, *few, *words, ranks=ranks)
        assert {outcome.code for outcome in codes} == {0}, codes
        found.append([loss for (loss,) in series(place / "runs" / name, "validation_loss")])
    for meshed in found[1:]:
        assert meshed == pytest.approx(found[0], rel=1e-6)


def test_rows_that_ranks_share_out_have_the_losses_of_one_process(place: Path) -> None:
    """Two ranks with half of each row: losses, bits per byte, counts of tokens, export and sample of one process."""
    bits = ("metrics.bits.use=metrics.bits_per_byte",)
    for name, size in (("rows", 1), ("parts", 2)):
        codes = drawloom(place, *COMMON, *bits, f"run.name={name}", f"mesh.context={size}", ranks=size)
        assert {outcome.code for outcome in codes} == {0}, codes
    assert_same(place / "runs/one", place / "runs/parts")
    ours, theirs = (series(place / "runs" / name, "bits_per_byte") for name in ("rows", "parts"))
    assert [value for (value,) in theirs] == pytest.approx([value for (value,) in ours], rel=1e-6)


def test_shared_matrix_products_have_the_losses_of_one_process(place: Path) -> None:
    """
    Two ranks along tensor, which share 257 bytes unevenly, of two that shard: the losses, export and sample of one
    process, also after a resume.
    """
    heads = ("model.num_key_value_heads=2",)
    sizes = ("mesh.tensor=2", "mesh.data_shard=2")
    for name, size, ranks in (("heads", (), 1), ("tensors", sizes, 4)):
        codes = drawloom(place, *COMMON, *heads, f"run.name={name}", *size, ranks=ranks)
        assert {outcome.code for outcome in codes} == {0}, codes
    assert_same(place / "runs/heads", place / "runs/tensors")
    assert (place / "runs/heads/sample.txt").read_text() == (place / "runs/tensors/sample.txt").read_text()
    take_back(place / "runs/tensors", 5)
    codes = drawloom(place, *COMMON, *heads, "run.name=tensors", "mesh.tensor=1", ranks=2)
    assert {outcome.code for outcome in codes} == {0}, codes
    assert_same(place / "runs/heads", place / "runs/tensors")


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

[stages]
dispatcher = { use = "experts.all_to_all" }
"""


def test_experts_that_ranks_share_out_have_the_losses_of_one_process(place: Path) -> None:
    """Two ranks with half of the experts each: losses, export and sample of one process, also if one goes on alone."""
    (place / "experts.toml").write_text(EXPERTS, "utf-8")
    common = ("run", "experts.toml", *COMMON[2:4])
    for name, ranks in (("all", 1), ("halves", 2)):
        words = (f"run.name={name}", f"mesh.data_shard={ranks}", f"mesh.expert={ranks}")
        codes = drawloom(place, *common, *words, ranks=ranks)
        assert {outcome.code for outcome in codes} == {0}, codes
    one, run = place / "runs/all", place / "runs/halves"
    assert_same(one, run)
    assert (one / "sample.txt").read_text() == (run / "sample.txt").read_text()
    take_back(run, 5)
    codes = drawloom(place, *common, "run.name=halves", ranks=1)
    assert {outcome.code for outcome in codes} == {0}, codes
    assert_same(one, run)


def test_a_sample_after_a_kill_is_that_of_a_straight_run(place: Path) -> None:
    """A process that has only the sample left to make draws the same text, from experts in shared memory, too."""
    (place / "shared.toml").write_text(EXPERTS.replace("all_to_all", "symmetric"), "utf-8")
    words = ("run", "shared.toml", *COMMON[2:4], "mesh.data_shard=2", "mesh.expert=2", "sample.tokens=60")
    texts = []
    for _ in range(2):
        codes = drawloom(place, *words, "run.name=shared", ranks=2)
        assert {outcome.code for outcome in codes} == {0}, codes
        texts.append((place / "runs/shared/sample.txt").read_bytes())
        (place / "runs/shared/sample.txt").unlink()
    assert texts[0] == texts[1] and b"experts.symmetric" not in texts[0]


def test_explain_and_draw_say_how_ranks_share_the_parameters() -> None:
    """For each dimension of the mesh that divides parameters there is a line, on any machine."""
    sizes = ("mesh.pipeline=2", "mesh.tensor=2", "mesh.data_shard=4", "batch.micro_size=4")
    recipe = api.Recipe.load("first_run", *sizes)
    for line in (
        "layers: partitioned over 2 pipeline ranks",
        "split over 2 ranks, and tokens in between",
        "sharded over 4 ranks; weights are gathered once a step",
    ):
        assert line in recipe.explain("stages") and line in recipe.draw(focus="stages")
    words = ("mesh.tensor=2", "mesh.data_shard=4", "mesh.expert=2", "batch.micro_size=4", "model.vocab_size=320")
    text = api.Recipe.load("moe", *words, 'stages.dispatcher={use="experts.all_to_all"}').explain("stages")
    assert "experts: partitioned over 2 ranks, and sharded over 4" in text
    assert "ranks" not in api.Recipe.load("first_run").explain("stages").partition("used by")[0]


def test_an_export_after_a_sample_holds_masters_and_not_what_was_gathered(place: Path) -> None:
    """What a forward has gathered is in the compute dtype, and stays gathered; an export is of the float32 slices."""
    last = ("trainer.steps=2", 'trainer.on_finish=["@sample", "@export"]', "precision.compute=bfloat16")
    codes = drawloom(place, *COMMON, *last, "run.name=sampled", "mesh.data_shard=2", ranks=2)
    assert {outcome.code for outcome in codes} == {0}, codes
    assert {tensor.dtype for tensor in exported(place / "runs/sampled").values()} == {torch.float32}


def test_stochastic_rounding_has_the_same_noise_on_shards(place: Path) -> None:
    """bfloat16 weights that are rounded stochastically are the same on one process and on two that shard."""
    rounded = (
        "optimizer.use=optim.stochastic_adamw",
        "optimizer.lr=1e-3",
        "precision.parameter=bfloat16",
        "trainer.steps=3",
    )
    found = []
    for name, ranks in (("noise of one", 1), ("noise of two", 2)):
        codes = drawloom(place, *COMMON, *rounded, f"run.name={name}", f"mesh.data_shard={ranks}", ranks=ranks)
        assert {outcome.code for outcome in codes} == {0}, codes
        found.append(exported(place / f"runs/{name}"))
    for name, weight in found[0].items():
        # Gradients differ in their last bits, so that a few elements are rounded otherwise.
        assert (weight != found[1][name]).float().mean() < 0.02, name
