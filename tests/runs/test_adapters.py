"""Runs that train adapters of a model that another run exported."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drawloom.components.checkpoint.reader import load_node
from support.runs import drawloom, series, take_back, write_corpus

LORA = """
extends = "./tiny.toml"

[model]
use = "model.auto"
path = "runs/tiny/export"

[batch]
global_size = 4
micro_size = 1

[stages]
adapters = ["@lora", "@norms"]

[lora]
use = "adapters.lora"
targets = ["*_proj", "embed_tokens"]
rank = 2
alpha = 4.0

[norms]
use = "adapters.full_tuning"
targets = ["norm"]

[adapter]
use = "export.adapter"

[checkpoint]
every = 3

[trainer]
steps = 6
on_finish = ["@export", "@adapter", "@sample"]
"""
LEARNED = ("loss", "grad_norm", "validation_loss")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an exported base, and a run that adapts it on one process."""
    folder = tmp_path_factory.mktemp("adapters")
    write_corpus(folder)
    (folder / "lora.toml").write_text(LORA, "utf-8")
    sizes = ("model.num_hidden_layers=2", "model.num_key_value_heads=2")
    base = ("run", "tiny.toml", *sizes, "trainer.steps=2", "trainer.on_finish=['@export']")
    assert drawloom(folder, *base)[0].code == 0
    train(folder, "one")
    return folder


def train(place: Path, name: str, *words: str, ranks: int = 1, recipe: str = "lora.toml") -> str:
    """A run of the recipe; gives what rank 0 printed."""
    outcomes = drawloom(place, "run", recipe, f"run.name={name}", *words, ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
    return outcomes[0].text


def assert_close(run: Path, other: Path, rel: float) -> None:
    """Losses and norms of every step are equal, but for roundings."""
    ours, theirs = series(run, *LEARNED), series(other, *LEARNED)
    assert len(ours) == len(theirs) == 6
    for mine, yours in zip(ours, theirs, strict=True):
        assert [value or 0 for value in mine] == pytest.approx([value or 0 for value in yours], rel=rel)


def test_only_what_is_trained_is_saved_and_changed(place: Path) -> None:
    """Checkpoints hold adapters and what is tuned in full, and no moments of others; the base stays as it is."""
    checkpoint = place / "runs/one/checkpoints/step-6"
    for node in ("stages", "optimizer"):
        names = load_node(checkpoint, node).keys() - {"frozen"}
        assert all("lora_" in name or name == "model.norm.weight" for name in names) and len(names) == 31
    config = json.loads((place / "runs/one/export/config.json").read_text("utf-8"))
    assert config["tie_word_embeddings"] is False, "the head would change with the embedding"
    base = load_file(place / "runs/tiny/export/model.safetensors")
    merged = load_file(place / "runs/one/export/model.safetensors")
    assert torch.equal(merged["lm_head.weight"], base["model.embed_tokens.weight"])
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {
        name for name in base if "_proj" in name or name in ("model.norm.weight", "model.embed_tokens.weight")
    }


LAYOUTS: dict[str, tuple[Sequence[str], float]] = {
    "split": (("mesh.pipeline=2", "schedule.use=pipeline.schedules.zero_bubble_1p"), 1e-5),
    "replicas": (("batch.micro_size=2",), 1e-5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_the_adapters_of_one(place: Path, layout: str) -> None:
    """Pipelines with backward passes in two parts, and replicas, have the losses of one process, and its adapter."""
    words, rel = LAYOUTS[layout]
    train(place, layout, *words, ranks=2)
    assert_close(place / "runs" / layout, place / "runs/one", rel)
    ours, theirs = (load_file(place / "runs" / n / "adapter/adapter_model.safetensors") for n in (layout, "one"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-3, atol=1e-4)


def test_a_frozen_rank_and_narrow_weights_train_and_resume(place: Path) -> None:
    """One rank has nothing to train and layers compute in bfloat16: a resumed run has the bits of the whole one."""
    words = (
        "mesh.pipeline=2",
        "lora.targets=['layers.1.*_proj']",
        "stages.adapters=['@lora']",
        "precision.compute=bfloat16",
        "precision.gradient=float32",
    )
    train(place, "narrow", *words, ranks=2)
    whole = series(place / "runs/narrow", *LEARNED)
    take_back(place / "runs/narrow", 3)
    text = train(place, "narrow", *words, ranks=2)
    assert series(place / "runs/narrow", *LEARNED) == whole
    assert "merged the adapters into the weights: rounding loses" in text
    saved = load_node(place / "runs/narrow/checkpoints/step-6", "stages")
    assert {saved[name].dtype for name in saved.keys() - {"frozen"}} == {torch.float32}
    for file in (place / "runs/narrow/export").glob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}


def test_other_base_weights_are_refused(place: Path) -> None:
    """Frozen weights are not in a checkpoint, so the folder that they come from must be the same, for commands too."""
    train(place, "other", "trainer.steps=3", "trainer.on_finish=[]")
    assert drawloom(place, "generate", "runs/other", "--prompt", "def", "--tokens", "3")[0].code == 0
    file = place / "runs/tiny/export/model.safetensors"
    kept, tensors = file.read_bytes(), load_file(file)
    try:
        save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}, file)
        words = ("run", "lora.toml", "run.name=other", "trainer.steps=4", "--accept-changes")
        for command in (words, ("generate", "runs/other", "--prompt", "def")):
            [outcome] = drawloom(place, *command)
            assert outcome.code != 0 and "are not those that the run started from" in outcome.text, outcome.text
            assert "Traceback" not in outcome.text
    finally:
        file.write_bytes(kept)


@pytest.mark.parametrize("tensor", [1, 2])
def test_adapters_of_sharded_weights_have_the_losses_of_one_process(place: Path, tensor: int) -> None:
    """Ranks that shard the frozen weights, or share them and the factors: losses, adapter and export of one process."""
    name = f"shared-{tensor}"
    train(place, name, f"mesh.tensor={tensor}", "mesh.data_shard=2", ranks=2 * tensor)
    assert_close(place / "runs/one", place / "runs" / name, rel=1e-5)
    for file in ("export/model.safetensors", "adapter/adapter_model.safetensors"):
        alone, shared = (load_file(place / "runs" / each / file) for each in ("one", name))
        assert alone.keys() == shared.keys()
        for key, weight in alone.items():
            assert (weight - shared[key]).abs().max() < 1e-4, key


def test_new_tokens_are_trained_alone(place: Path) -> None:
    """
    Of a tied table the rows of two ids change, and nothing else: a checkpoint holds them alone, and two pipeline ranks,
    which hold them both, have the losses and the rows of one process.
    """
    (place / "new.toml").write_text(LORA.replace('[adapter]\nuse = "export.adapter"\n', ""), "utf-8")
    words = ("model.new_tokens=2", "stages.adapters=['@norms']", "norms.targets=['new_tokens']", "optimizer.lr=0.1")
    alone = (*words, "trainer.on_finish=['@export']")
    train(place, "new", *alone, recipe="new.toml")
    train(place, "new_pipeline", *alone, "mesh.pipeline=2", ranks=2, recipe="new.toml")
    assert_close(place / "runs/new_pipeline", place / "runs/new", 1e-5)
    saved = load_node(place / "runs/new/checkpoints/step-6", "stages")
    assert saved.keys() == {"frozen", "model.embed_tokens.new_tokens"}
    base = load_file(place / "runs/tiny/export/model.safetensors")
    for run in ("new", "new_pipeline"):
        files = (place / "runs" / run / "export").glob("*.safetensors")
        found = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert found.keys() == base.keys()
        changed = {name for name in base if not torch.equal(base[name], found[name])}
        assert changed == {"model.embed_tokens.weight"}
        rows = (base["model.embed_tokens.weight"] != found["model.embed_tokens.weight"]).any(1)
        assert rows.nonzero().flatten().tolist() == [255, 256]


def test_a_tied_head_is_adapted_alone(place: Path) -> None:
    """Pipelines, in which the last rank has a copy of the table, and tensor ranks have the adapter of one process."""
    words = ("lora.targets=['lm_head', 'q_proj']", "stages.adapters=['@lora']")
    layouts = {"head": (1, []), "head_pipeline": (2, ["mesh.pipeline=2"]), "head_tensor": (2, ["mesh.tensor=2"])}
    found = {}
    for name, (ranks, mesh) in layouts.items():
        train(place, name, *words, *mesh, ranks=ranks)
        found[name] = load_file(place / "runs" / name / "adapter/adapter_model.safetensors")
        files = (place / "runs" / name / "export").glob("*.safetensors")
        merged = {key: tensor for file in files for key, tensor in load_file(file).items()}
        assert not torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
    for name in ("head_pipeline", "head_tensor"):
        assert_close(place / "runs" / name, place / "runs/head", 1e-5)
        assert found[name].keys() == found["head"].keys() >= {"base_model.model.lm_head.lora_A.weight"}
        for key, tensor in found["head"].items():
            torch.testing.assert_close(found[name][key], tensor, rtol=1e-3, atol=1e-4)
