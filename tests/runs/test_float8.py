"""Runs whose linear layers multiply in float8, on a CPU in plain torch."""

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
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe in float8, and a run of it on one process."""
    folder = tmp_path_factory.mktemp("float8")
    write_corpus(folder)
    (folder / "float8.toml").write_text(
        f'extends = ["./tiny.toml", "with_float8"]\n{SIZES}\n[lr]\nstart = 1.0\nphases = [{{ to = 1.0, steps = 1 }}]\n',
        "utf-8",
    )
    train(folder, "one")
    return folder


def train(place: Path, name: str, *words: str, ranks: int = 1) -> str:
    """Run the recipe, and return what the first process prints."""
    outcomes = drawloom(place, "run", "float8.toml", f"run.name={name}", *COMMON, *words, ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
    return outcomes[0].text


def losses(place: Path, name: str) -> list[float]:
    return [loss for (loss,) in series(place / "runs" / name, "loss")]


def test_a_resumed_run_has_the_bits_of_a_whole_one(place: Path) -> None:
    """Scales are functions of the data alone, so that a checkpoint needs no state of them."""
    whole = series(place / "runs/one", *LEARNED)
    train(place, "parts")
    take_back(place / "runs/parts", 2)
    train(place, "parts")
    assert series(place / "runs/parts", *LEARNED) == whole


@pytest.mark.parametrize("words", [("stages.recompute=blocks",), ("stages.recompute=selective",)])
def test_recomputation_has_the_bits_of_a_plain_run(place: Path, words: tuple[str, ...]) -> None:
    """Recomputed layers round to the same bits."""
    name = words[0].rpartition("=")[2]
    train(place, name, *words)
    assert series(place / "runs" / name, *LEARNED) == series(place / "runs/one", *LEARNED)


def test_float8_learns_what_bfloat16_learns(place: Path) -> None:
    """The losses differ from those in bfloat16, a little: the setting has an effect, and does no harm."""
    text = train(place, "bfloat16", "precision.linear=compute")
    ours, theirs = losses(place, "one"), losses(place, "bfloat16")
    assert ours != theirs and ours == pytest.approx(theirs, rel=2e-2)
    assert "linear layers multiply in float8" not in text


MESHES = {
    "replicas": ("mesh.data_replicate=2",),
    "shards": ("mesh.data_shard=2",),
    "tensor": ("mesh.tensor=2",),
    "context": ("mesh.context=2",),
    "zero_bubble": ("mesh.pipeline=2", "schedule.use=pipeline.schedules.zero_bubble_1p"),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_learn_what_one_process_does(place: Path, mesh: str) -> None:
    """Every dimension of the mesh has the losses of one process, except for rounding."""
    train(place, mesh, *MESHES[mesh], ranks=2)
    assert losses(place, mesh) == pytest.approx(losses(place, "one"), rel=1e-2)


def test_adapters_train_on_a_float8_base(place: Path) -> None:
    """LoRA's frozen weights multiply in float8, forward and for the inputs' gradients; only the factors change."""
    words = ("lora.use=adapters.lora", "lora.targets=['*_proj']", "lora.rank=4", "lora.alpha=8.0")
    adapters = ("stages.adapters=['@lora']", "export.use=export.adapter", "trainer.on_finish=['@export']")
    text = train(place, "lora", *words, *adapters)
    assert "14 of 14 linear layers multiply in float8" in text
    first, *_, last = losses(place, "lora")
    assert last < first
    factors = load_file(place / "runs/lora/adapter/adapter_model.safetensors")
    assert any(name.endswith("lora_B.weight") and tensor.any() for name, tensor in factors.items())
