"""Runs that train adapters on a model exported by another run."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drawloom.components.checkpoint.reader import load_node_state
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
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an exported base model and a run that adapts it on one process."""
    folder = tmp_path_factory.mktemp("adapters")
    write_corpus(folder)
    (folder / "lora.toml").write_text(LORA, "utf-8")
    sizes = ("model.num_hidden_layers=2", "model.num_key_value_heads=2")
    base = ("run", "tiny.toml", *sizes, "trainer.steps=2", "trainer.on_finish=['@export']")
    assert drawloom(folder, *base)[0].code == 0
    train(folder, "one")
    return folder


def train(folder: Path, name: str, *words: str, ranks: int = 1, recipe: str = "lora.toml") -> str:
    """Run the recipe and return what rank 0 printed."""
    outcomes = drawloom(folder, "run", recipe, f"run.name={name}", *words, ranks=ranks)
    assert [outcome.code for outcome in outcomes] == [0] * ranks, outcomes[0].text
    return outcomes[0].text


def assert_close(run: Path, other: Path, rel: float) -> None:
    """Assert that losses and norms of every step are equal up to rounding."""
    ours, theirs = series(run, *LEARNED), series(other, *LEARNED)
    assert len(ours) == len(theirs) == 6
    for our_values, their_values in zip(ours, theirs, strict=True):
        assert [value or 0 for value in our_values] == pytest.approx([value or 0 for value in their_values], rel=rel)


def test_only_trained_parameters_are_saved_and_changed(folder: Path) -> None:
    """Checkpoints have weights and moments of adapters and fully tuned modules only; the base does not change."""
    checkpoint = folder / "runs/one/checkpoints/step-6"
    for node in ("stages", "optimizer"):
        names = load_node_state(checkpoint, node).keys() - {"frozen"}
        assert all("lora_" in name or name == "model.norm.weight" for name in names) and len(names) == 31
    config = json.loads((folder / "runs/one/export/config.json").read_text("utf-8"))
    assert config["tie_word_embeddings"] is False, "the head would change with the embedding"
    base = load_file(folder / "runs/tiny/export/model.safetensors")
    merged = load_file(folder / "runs/one/export/model.safetensors")
    assert torch.equal(merged["lm_head.weight"], base["model.embed_tokens.weight"])
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {
        name for name in base if "_proj" in name or name in ("model.norm.weight", "model.embed_tokens.weight")
    }


def test_a_run_continues_from_an_adapter(folder: Path) -> None:
    """
    A run from another run's adapter begins with its validation loss, on one process and in a pipeline with shards.

    `check` refuses an adapter with other targets, rank or scale, one of another base, and a folder without one.
    """
    (folder / "next.toml").write_text(
        LORA.replace("adapters = [", 'adapter_weights = "runs/one/adapter"\nadapters = [')
    )
    short = ("trainer.steps=2", "evaluate.at_start=true", "trainer.on_finish=[]")
    train(folder, "next", *short, recipe="next.toml")
    train(folder, "next_pipeline", *short, "mesh.pipeline=2", "mesh.data_shard=2", ranks=4, recipe="next.toml")
    [*_, (last,)] = series(folder / "runs/one", "validation_loss")
    for run in ("next", "next_pipeline"):
        before_steps = json.loads((folder / "runs" / run / "metrics.jsonl").read_text("utf-8").splitlines()[0])
        assert before_steps["validation_loss"] == pytest.approx(last, rel=1e-5)
    alone, split = (series(folder / "runs" / run, "loss") for run in ("next", "next_pipeline"))
    assert [value for (value,) in split[1:]] == pytest.approx([value for (value,) in alone[1:]], rel=1e-5)
    shutil.copytree(folder / "runs/tiny/export", folder / "other")
    tensors = load_file(folder / "other/model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}, folder / "other/model.safetensors")
    for word, text in {
        "lora.rank=4": "wrong shape .* The folder has rank = 2, alpha = 4.0",
        "lora.alpha=8.0": "has factors of scale 4, and of 2 in the folder",
        "lora.targets=['q_proj', 'lm_head']": "the recipe adapts lm_head, .* the folder adapts .*down",
        "model.path=other": "its base has other weights than other",
        "stages.adapter_weights=runs/tiny/export": "has no adapter_config.json .* a whole model is a base",
        "stages.adapters=[]": "there are no adapters to fill",
        "model.path=runs/one/adapter": "is an adapter's folder.*stages.adapter_weights",
    }.items():
        [outcome] = drawloom(folder, "check", "next.toml", word)
        assert outcome.code == 2 and re.search(text, outcome.text), outcome.text


def test_a_frozen_rank_and_narrow_weights_train_and_resume(folder: Path) -> None:
    """A resumed run with a frozen rank and layers in bfloat16 has the bits of the uninterrupted one."""
    words = (
        "mesh.pipeline=2",
        "lora.targets=['layers.1.*_proj']",
        "stages.adapters=['@lora']",
        "precision.compute=bfloat16",
        "precision.gradient=float32",
    )
    train(folder, "narrow", *words, ranks=2)
    whole = series(folder / "runs/narrow", *LEARNED)
    take_back(folder / "runs/narrow", 3)
    text = train(folder, "narrow", *words, ranks=2)
    assert series(folder / "runs/narrow", *LEARNED) == whole
    assert "merged the adapters into the weights: rounding loses" in text
    saved = load_node_state(folder / "runs/narrow/checkpoints/step-6", "stages")
    assert {saved[name].dtype for name in saved.keys() - {"frozen"}} == {torch.float32}
    for file in (folder / "runs/narrow/export").glob("*.safetensors"):
        assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}


def test_other_base_weights_are_refused(folder: Path) -> None:
    """Frozen weights are not in a checkpoint, so runs and commands require the original base folder."""
    train(folder, "other", "trainer.steps=3", "trainer.on_finish=[]")
    assert drawloom(folder, "generate", "runs/other", "--prompt", "def", "--tokens", "3")[0].code == 0
    file = folder / "runs/tiny/export/model.safetensors"
    kept, tensors = file.read_bytes(), load_file(file)
    try:
        save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] + 1}, file)
        words = ("run", "lora.toml", "run.name=other", "trainer.steps=4", "--accept-changes")
        for command in (words, ("generate", "runs/other", "--prompt", "def")):
            [outcome] = drawloom(folder, *command)
            assert outcome.code != 0 and "are not the weights that the run started from" in outcome.text, outcome.text
            assert "Traceback" not in outcome.text
    finally:
        file.write_bytes(kept)


def test_new_tokens_are_trained_alone(folder: Path) -> None:
    """
    Only the rows of two new ids change in a tied embedding table, and a checkpoint has no other rows.

    Two pipeline ranks, both with a copy of these rows, have the losses and the rows of one process.
    """
    (folder / "new.toml").write_text(LORA.replace('[adapter]\nuse = "export.adapter"\n', ""), "utf-8")
    words = ("model.new_tokens=2", "stages.adapters=['@norms']", "norms.targets=['new_tokens']", "optimizer.lr=0.1")
    alone = (*words, "trainer.on_finish=['@export']")
    train(folder, "new", *alone, recipe="new.toml")
    train(folder, "new_pipeline", *alone, "mesh.pipeline=2", ranks=2, recipe="new.toml")
    assert_close(folder / "runs/new_pipeline", folder / "runs/new", 1e-5)
    saved = load_node_state(folder / "runs/new/checkpoints/step-6", "stages")
    assert saved.keys() == {"frozen", "model.embed_tokens.new_tokens"}
    base = load_file(folder / "runs/tiny/export/model.safetensors")
    for run in ("new", "new_pipeline"):
        files = (folder / "runs" / run / "export").glob("*.safetensors")
        exported = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert exported.keys() == base.keys()
        changed = {name for name in base if not torch.equal(base[name], exported[name])}
        assert changed == {"model.embed_tokens.weight"}
        rows = (base["model.embed_tokens.weight"] != exported["model.embed_tokens.weight"]).any(1)
        assert rows.nonzero().flatten().tolist() == [255, 256]


def test_a_tied_head_is_adapted_alone(folder: Path) -> None:
    """Adapters of a head whose weight the embedding shares change only the head."""
    train(folder, "head", "lora.targets=['lm_head', 'q_proj']", "stages.adapters=['@lora']")
    assert "base_model.model.lm_head.lora_A.weight" in load_file(folder / "runs/head/adapter/adapter_model.safetensors")
    merged = load_file(folder / "runs/head/export/model.safetensors")
    assert not torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
