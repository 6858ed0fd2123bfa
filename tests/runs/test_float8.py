"""Runs with float8 linear layers, on a CPU in plain torch."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from support.runs import drawloom, series, take_back, write_corpus

LEARNED = ("step", "loss", "grad_norm", "lr")
SIZES = """
[model]
num_hidden_layers = 2
hidden_size = 32
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 16
intermediate_size = 64
"""
COMMON = ("trainer.steps=4", "trainer.on_finish=[]", "batch.micro_size=2", "checkpoint.every=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a recipe in float8 and its run on one process."""
    folder = tmp_path_factory.mktemp("float8")
    write_corpus(folder)
    precision = '[precision]\nparameter = "float32"\ncompute = "bfloat16"\ngradient = "float32"\n'
    lr = "[lr]\nstart = 1.0\nphases = [{ to = 1.0, steps = 1 }]\n"
    (folder / "bfloat16.toml").write_text(f'extends = "./tiny.toml"\n{SIZES}\n{precision}\n{lr}', "utf-8")
    (folder / "float8.toml").write_text('extends = ["./bfloat16.toml", "with_float8"]', "utf-8")
    train(folder, "one")
    return folder


def train(folder: Path, name: str, *words: str, ranks: int = 1, recipe: str = "float8.toml") -> str:
    """Run the recipe and return what rank 0 printed."""
    outcomes = drawloom(folder, "run", recipe, f"run.name={name}", *COMMON, *words, ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
    return outcomes[0].text


def read_losses(folder: Path, name: str) -> list[float]:
    return [loss for (loss,) in series(folder / "runs" / name, "loss")]


def test_a_resumed_run_has_the_bits_of_a_whole_one(folder: Path) -> None:
    """A resumed run has the uninterrupted run's bits, because scales depend on the data alone."""
    whole = series(folder / "runs/one", *LEARNED)
    train(folder, "parts")
    take_back(folder / "runs/parts", 2)
    train(folder, "parts")
    assert series(folder / "runs/parts", *LEARNED) == whole


@pytest.mark.parametrize(
    "words",
    [
        ("stages.recompute=blocks", "float8.round_weights=step", "evaluate.every=2"),
        ("stages.recompute=selective",),
    ],
)
def test_recomputation_has_the_bits_of_a_plain_run(folder: Path, words: tuple[str, ...]) -> None:
    """Runs with recomputed layers, and with weights rounded once a step, have the same metrics, bit by bit."""
    name = words[0].rpartition("=")[2]
    train(folder, name, *words)
    assert series(folder / "runs" / name, *LEARNED) == series(folder / "runs/one", *LEARNED)


def test_float8_losses_are_close_to_bfloat16(folder: Path) -> None:
    """Losses in float8 differ from losses in bfloat16 by less than 2 %."""
    text = train(folder, "bfloat16", recipe="bfloat16.toml")
    ours, theirs = read_losses(folder, "one"), read_losses(folder, "bfloat16")
    assert ours != theirs and ours == pytest.approx(theirs, rel=2e-2)
    assert "linear layers multiply in float8" not in text


MESHES = {
    "replicas": ("mesh.data_replicate=2",),
    "shards": ("mesh.data_shard=2", "float8.gather=true"),
    "shards_gathered_once": ("mesh.data_shard=2", "float8.gather=true", "stages.reshard_after_forward=false"),
    "tensor": ("mesh.tensor=2",),
    "context": ("mesh.context=2",),
    "zero_bubble": ("mesh.pipeline=2", "schedule.use=pipeline.schedules.zero_bubble_1p"),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_has_the_losses_of_one_process(folder: Path, mesh: str) -> None:
    """Every mesh dimension has the losses of one process up to rounding."""
    train(folder, mesh, *MESHES[mesh], ranks=2)
    assert read_losses(folder, mesh) == pytest.approx(read_losses(folder, "one"), rel=1e-2)


SPARSE = f"""
extends = "./float8.toml"
{SIZES}
use = "model.qwen3.moe"
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 32

[stages]
dispatcher.use = "experts.all_to_all"
"""


def test_experts_train_in_float8(folder: Path) -> None:
    """
    Experts' weights rounded once a step change no bit; expert-parallel ranks, and bfloat16, agree up to rounding.
    """
    (folder / "sparse.toml").write_text(SPARSE, "utf-8")
    texts = {}
    for name, ranks, *words in (
        ("experts", 1),
        ("experts_step", 1, "float8.round_weights=step", "stages.recompute=blocks"),
        ("experts_two", 2, "mesh.data_shard=2", "mesh.expert=2"),
        ("experts_compute", 1, "float8.exclude=['*.experts']"),
    ):
        words = ["run", "sparse.toml", f"run.name={name}", *COMMON, *words]
        outcomes = drawloom(folder, *words, ranks=ranks)
        assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
        texts[name] = outcomes[0].text
    assert "8 of 8 linear layers and 2 of 2 layers of experts multiply in float8" in texts["experts"]
    assert "8 of 8 linear layers and 0 of 2 layers of experts" in texts["experts_compute"]
    assert series(folder / "runs/experts", *LEARNED) == series(folder / "runs/experts_step", *LEARNED)
    one, two, other = (read_losses(folder, name) for name in ("experts", "experts_two", "experts_compute"))
    assert two == pytest.approx(one, rel=1e-2) and other == pytest.approx(one, rel=2e-2) and other != one


def test_adapters_train_on_a_float8_base(folder: Path) -> None:
    """LoRA's frozen weights multiply in float8, forward and for the inputs' gradients; only the factors change."""
    words = ("lora.use=adapters.lora", "lora.targets=['*_proj']", "lora.rank=4", "lora.alpha=8.0")
    adapters = ("stages.adapters=['@lora']", "export.use=export.adapter", "trainer.on_finish=['@export']")
    text = train(folder, "lora", *words, *adapters)
    assert "14 of 14 linear layers multiply in float8" in text
    first, *_, last = read_losses(folder, "lora")
    assert last < first
    factors = load_file(folder / "runs/lora/adapter/adapter_model.safetensors")
    assert any(name.endswith("lora_B.weight") and tensor.any() for name, tensor in factors.items())
