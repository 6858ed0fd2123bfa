"""Surgery: a folder's model with new parts, and the recipe that heals it."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from drawloom import Recipe, RecipeError
from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.model.gemma3 import Gemma3
from drawloom.components.model.phi3 import Phi3
from drawloom.components.stages.grafted import GraftedParts
from drawloom.components.weights.load import persistent_tensors
from support.adapted import OneStage
from support.families import small
from support.qwen3 import whole
from support.runs import drawloom, rows

SIZES = {
    **{"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"head_dim": 16, "intermediate_size": 64},
}
NEW_SIZES = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 16},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with texts and a small Qwen3, trained for some steps."""
    folder = tmp_path_factory.mktemp("surgery")
    lines = [f"The loom has {number} threads, and {number + 1} is more than {number}.\n" for number in range(3000)]
    for part in range(10):
        (folder / f"{part}.txt").write_text("".join(lines[part::10]), "utf-8")
    sizes = [f"model.{key}={size}" for key, size in SIZES.items()]
    words = ["corpus.use=data.text_files", 'corpus.paths=["*.txt"]', "batch.micro_size=8", "batch.global_size=8"]
    words += ["vars.length=64", "trainer.steps=50", 'trainer.on_finish=["@export"]', "optimizer.lr=1e-2"]
    (folder / "drawn.toml").write_text('extends = "heal"\nunset = ["graft"]\nrun.name = "drawn"\n', "utf-8")
    [outcome] = drawloom(folder, "run", "first_run", *sizes, *words)
    assert outcome.code == 0, outcome.text
    return folder


def words_of(folder: Path, *words: str) -> list[str]:
    """Return a heal run's words."""
    given = [f"vars.base={folder / 'runs/first_run/export'}", f'corpus.paths=["{folder}/*.txt"]', "device.kind=cpu"]
    sizes = [f"model.{key}={size}" for key, size in NEW_SIZES.items()]
    return [*given, *sizes, "batch.micro_size=8", "batch.global_size=8", "vars.length=64", *words]


def test_kept_parts_are_the_folders_and_new_ones_are_drawn(folder: Path, tmp_path: Path) -> None:
    """New parameters have the values of the seed; all others the folder's bits; both are in the run's summary."""
    values = {}
    for recipe in (str(folder / "drawn.toml"), "heal"):
        with Recipe.load(recipe, *words_of(folder, f"run.folder={tmp_path / 'run'}")).open(["stages"]) as objects:
            module = objects["stages"].local[0].module
            values[recipe] = {key: tensor.detach().clone() for key, tensor in persistent_tensors(module).items()}
            phrases = [*objects["stages"].describe_features(module)]
    drawn, grafted = values.values()
    base = load_file(folder / "runs/first_run/export/model.safetensors")
    new = {name for name in grafted if ".linear_attn." in name}
    replaced = {name for name in base if ".self_attn." in name and ".layers.3." not in name}
    assert grafted.keys() - new == base.keys() - replaced
    for name, tensor in grafted.items():
        assert torch.equal(tensor, (drawn if name in new else base)[name]), name
    assert phrases[-2:] == ["new: 39 in model.layers.*.linear_attn", "replaced: 18 in model.layers.*.self_attn"]


def test_a_joined_tensor_with_a_new_part_is_replaced(tmp_path: Path) -> None:
    """Phi-3's file has queries, keys and values in one tensor; new queries replace a part of it, and no other one."""
    model = small(Phi3)
    module = whole(model)
    write_hugging_face_folder(tmp_path, model, OneStage(module))
    precision: Any = None  # counts alone are described
    graft = GraftedParts(model=model, folder=tmp_path, new=["*.q_proj.*"])
    assert [*graft.describe_model(module, precision)][1:] == [
        "new: 2 in model.layers.*.self_attn",
        "replaced: 2 in model.layers.*.self_attn",
    ]


def test_the_text_part_of_a_multimodal_model_is_a_base(tmp_path: Path) -> None:
    """Its tensors have nested names; other parts' tensors are neither read nor replaced."""
    model = small(Gemma3)
    module = whole(model)
    write_hugging_face_folder(tmp_path, model, OneStage(module))
    file = tmp_path / "model.safetensors"
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "model.vision_tower.weight": torch.ones(2)}, file)
    graft, precision = GraftedParts(model=model, folder=tmp_path, new=["*.mlp.*"]), cast(Any, None)
    graft.check_before_open()
    assert [*graft.describe_model(module, precision)][1:] == [
        "new: 6 in model.layers.*.mlp",
        "replaced: 6 in model.layers.*.mlp",
    ]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (['graft.new=["*.linear_atn.*"]'], r"called '\*\.linear_atn\.\*'(?s:.*)did you mean '\*\.linear_attn\.\*'\?"),
        (['graft.new=["*.self_atn*q_proj*"]'], r"did you mean '\*\.self_attn\*q_proj\*'\?"),
        (['graft.new=["*.vision.*"]'], "write another pattern, or remove it"),
        (['graft.new=["*.in_proj_*"]'], "missing model.layers.0.linear_attn.conv_q"),
        (["model.intermediate_size=48"], "wrong shape model.layers.0.mlp.gate_proj.weight"),
        (["model.use_qk_norm=false"], "unexpected model.layers.3.self_attn.k_norm.weight"),
        (
            [*["model.residual=hyper", "model.layers=attention", "model.use_qk_norm=false"], 'graft.new=["*_conn*"]'],
            "unexpected model.layers.0.self_attn.k_norm.weight",
        ),
        (["stages.weights=$vars.base"], "reads the initial weights, and"),
        (["graft.new=[]"], "write a pattern"),
    ],
)
def test_check_refuses_what_does_not_fit(words: list[str], text: str, folder: Path) -> None:
    """Typos, missing parts, other shapes, and tensors without a parameter in an unchanged layer are problems."""
    with pytest.raises(RecipeError, match=text):
        Recipe.load("heal", *words_of(folder, *words)).check()


def test_a_model_with_weights_of_its_own_is_no_base_for_new_parts(folder: Path) -> None:
    """Its new parts would have the folder's old values."""
    graft = ["graft.use=stages.grafted", "graft.folder=$vars.base", 'graft.new=["*.mlp.*"]']
    words = [word for word in words_of(folder, *graft) if not word.startswith("model.")]
    with pytest.raises(RecipeError, match=r"reads the initial weights, and \[model\] does so, too"):
        Recipe.load("finetune", *words).check()


def test_new_parts_trained_alone_are_evaluated_with_the_folders_others(folder: Path) -> None:
    """A checkpoint of adapters lacks the frozen parts, and the run's folder of the graft has them."""
    adapters = ['stages.adapters=["@tuning"]', "tuning.use=adapters.full_tuning", 'tuning.targets=["*.linear_attn.*"]']
    words = words_of(folder, *adapters, "run.name=alone", "trainer.steps=2", "trainer.on_finish=[]")
    [outcome] = drawloom(folder, "run", "heal", *words)
    assert outcome.code == 0, outcome.text
    [outcome] = drawloom(folder, "evaluate", "runs/alone")
    assert outcome.code == 0, outcome.text
    [outcome] = drawloom(folder, "export", "runs/alone", "--to", "exported")
    assert outcome.code == 2 and "transformers has no class for its model" in outcome.text


@pytest.mark.soak
def test_distillation_heals_a_grafted_model(folder: Path) -> None:
    """In equally many steps, the healed model comes nearer to the teacher than a drawn one, and than it was."""
    divergences = {}
    for recipe in ("heal", "drawn.toml"):
        words = words_of(folder, "trainer.steps=12", "trainer.on_finish=[]", "optimizer.lr=4e-3")
        [outcome] = drawloom(folder, "run", recipe, *words)
        assert outcome.code == 0, outcome.text
        name = recipe.removesuffix(".toml")
        divergences[name] = [row["divergence"] for row in rows(folder / "runs" / name)]
    healed, drawn = divergences.values()
    assert healed[-1] < 0.5 * drawn[-1] and healed[-1] < 0.5 * healed[0]
    [outcome] = drawloom(folder, "evaluate", "runs/heal")
    assert outcome.code == 0, outcome.text
