"""A frozen second model: refused recipes, and its memory in plans."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.hugging_face_tokenizer import HuggingFaceTokenizer
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.planning.plan import plan
from drawloom.components.ports.model import list_quantized_parameter_formats
from drawloom.components.weights.token_ids import compare_folder_ids
from drawloom.graph import RecipeError
from drawloom.graph.project import Recipe
from support.qwen3 import SIZES, dense, whole

QUANTIZED = {"use": "frozen_weights.quantized"}
TEACHER = SIZES | {"vocab_size": 257, "hidden_size": 40}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A folder with a teacher for 257 ids."""
    model = dense(**TEACHER)
    save_file(dict(whole(model).named_parameters()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.hugging_face_config()))
    return tmp_path


def taught(base: Path, **tables: Any) -> Recipe:
    """Return a student's recipe, with two layers and 257 ids."""
    model = {"use": "model.qwen3.dense", **SIZES, "vocab_size": 257}
    teacher = {"use": "stages.frozen", "model": {"use": "model.auto", "path": str(base)}}
    tables = {"model": model, "teacher": teacher, "loss": {"use": "loss.distill"}} | tables
    tables["batch"] = {"micro_size": 4}
    run = {"name": "taught", "folder": str(base / "run")}
    return Recipe.load("first_run").with_values(
        {name: table for name, table in {**tables, "run": run}.items() if table}
    )


def problems(recipe: Recipe) -> list[str]:
    return [str(problem) for problem in recipe.graph.problems]


def test_wrong_loops_are_refused(base: Path) -> None:
    """A recipe is refused if its teacher has other ids, random weights, no use, or is the trained model."""
    assert problems(taught(base)) == []
    model = {"use": "model.auto", "path": str(base)}
    compiled = {"use": "stages.frozen", "model": model, "features": [{"use": "stages.compiled"}]}
    assert problems(taught(base, teacher=compiled)) == []
    loss = {"use": "loss.distill"}
    flat = {"use": "stages.frozen", "model": {"use": "model.qwen3.dense", **TEACHER}, "weights": str(base)}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": {"vocab_size": 300}}, "[teacher.model] has a vocabulary of 257 ids, and [model] of 300"),
        ({"teacher": None}, "[loss] compares with a frozen model, and [executor] has none"),
        ({"loss": {"use": "loss.next_token"}}, "[loss] does not compare with [teacher]"),
        ({"loss": loss | {"reference": "data"}}, "[loss] does not compare with [teacher]"),
        ({"loss": loss | {"reference": "data", "temperature": 2.0}, "teacher": None}, "have the temperature 1"),
        ({"teacher": {"use": "stages.frozen", "model": "@model"}}, "[teacher] would have random weights"),
        ({"teacher": flat | {"features": ["@quantized"]}, "quantized": QUANTIZED}, "has a table of its own, by which"),
        ({"teacher": flat | {"features": [QUANTIZED]}}, "frozen weights in nf4 are dequantized to bfloat16"),
        ({"second": flat}, "[loss] compares with a frozen model, and [executor] has 2"),
        ({"mesh": {"tensor": 3}}, "[teacher.model]"),
        (
            {"mesh": {"pipeline": 4}, "model": {"num_hidden_layers": 4}, "teacher": flat},
            "2 layers can't be split over 4 ranks",
        ),
        (
            {"schedule": {"use": "pipeline.schedules.circular"}, "executor": {"use": "pipeline.circular.executor"}},
            "[loss] compares with another model on the last rank",
        ),
    ]
    for tables, text in cases:
        changed = {name: table for name, table in tables.items() if name == "model"}
        others = {name: table for name, table in tables.items() if name != "model"}
        found = problems(taught(base, **others).with_values(changed))
        assert any(text in problem for problem in found), (text, found)


PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
"""Options of an added token in tokenizer.json."""


def test_features_of_a_teacher_change_its_layers_alone(tmp_path: Path) -> None:
    """A teacher's weights are stored in NF4, and the trained model's are not."""
    model = dense(**TEACHER | {"hidden_size": 64, "head_dim": 64, "intermediate_size": 64})
    save_file(dict(whole(model).named_parameters()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.hugging_face_config()))
    teacher = {"use": "stages.frozen", "model": {"use": "model.auto", "path": str(tmp_path)}, "features": [QUANTIZED]}
    recipe = taught(tmp_path, teacher=teacher, precision={"compute": "bfloat16"})
    with recipe.open(["stages", "teacher"]) as objects:
        trained, frozen = objects["stages"].local, objects["teacher"]._stages.local
        counts = [len(list_quantized_parameter_formats(stage.module)) for stage in (*trained, *frozen)]
    assert counts == [0, 7 * TEACHER["num_hidden_layers"]]


def test_a_teacher_must_have_the_ids_of_the_data(base: Path) -> None:
    """
    `check` compares tokens and ids. A table with more rows or more tokens passes, as padding; other ids don't, though
    as many.

    Other control tokens, or a folder without a tokenizer, are a warning of the run.
    """
    Bytes().save(base)
    path = base / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    recipe = taught(base).with_values({"model": {"vocab_size": 300}})
    assert recipe.check() == []

    def write(ids: Any, *added: dict[str, Any]) -> None:
        model = {"type": "BPE", "vocab": ids, "merges": []}
        path.write_text(json.dumps({**content, "model": model, "added_tokens": added}))

    write([[token, 0.0] for token in [*vocabulary, "more"]])  # of the kind Unigram
    assert recipe.check() == []
    others = {"turned": dict(zip(vocabulary, [*range(1, 257), 0], strict=True)), "short": {"a": ord("a")}}
    for ids, said in zip(others.values(), ("is 1 there, and is 0", "has no id there"), strict=True):
        write(ids)
        with pytest.raises(RecipeError, match=said):
            recipe.check()
    tokenizer = HuggingFaceTokenizer(path=base / "own")
    (base / "own").mkdir()
    Bytes().save(base / "own")
    own = json.loads((base / "own/tokenizer.json").read_text())
    own["added_tokens"] = [{"id": 256, "content": "<|end|>", "special": True, **PLAIN}]
    (base / "own/tokenizer.json").write_text(json.dumps(own))
    write({token: number for token, number in vocabulary.items() if number != 256}, {"id": 256, "content": "<e>"})
    assert "other control tokens than the data: the token '<|end|>'" in (compare_folder_ids(base, tokenizer) or "")
    path.unlink()
    assert "has no tokenizer.json" in (compare_folder_ids(base, tokenizer) or "")


@pytest.mark.parametrize("mesh", [{}, {"data_shard": 2}, {"pipeline": 2}], ids=["one", "shards", "stages"])
def test_plans_count_the_memory_of_the_teacher(base: Path, mesh: dict[str, int]) -> None:
    """A plan counts the teacher's parameters, and its hidden states for all microbatches."""
    ranks = max(mesh.values(), default=1)
    device = find_device_model("h100")
    alone = plan(taught(base, teacher=None, loss={"use": "loss.next_token"}, mesh=mesh), device, ranks)
    both = plan(taught(base, mesh=mesh), device, ranks)
    weights = sum(parameter.nbytes for parameter in whole(dense(**TEACHER)).parameters())
    added = [
        sum(ours.persistent.values()) - sum(theirs.persistent.values())
        for ours, theirs in zip(both.memory, alone.memory, strict=True)
    ]
    assert sum(added) == pytest.approx(weights, rel=0.6 if mesh else 1e-6)
    assert all(size > 0 for size in added)
    states = both.microbatches * both.rows.count * both.rows.length * TEACHER["hidden_size"] * torch.float32.itemsize
    assert [memory.buffers.get("reference", 0) for memory in both.memory] == [*[0] * (len(both.memory) - 1), states]
    assert both.time.reference > 0 == alone.time.reference
