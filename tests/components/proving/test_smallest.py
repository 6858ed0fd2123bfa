"""The smallest recipes, and the generated rows."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from drawloom import RecipeError, UserError
from drawloom.components.data.bytes import Bytes
from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.proving.rows import ProvingRows
from drawloom.components.proving.run import Subject
from drawloom.graph.project import Project
from support.adapted import OneStage
from support.mesh_faults import FAULTS
from support.qwen3 import dense, whole

PLACED = (
    *("loss.next_token", "loss.dft", "optim.muon", "optim.adamw", "gradients.clip_group_norm", "learning_rate.linear"),
    *("metrics.perplexity", "metrics.layer_norms", "phases.ema", "phases.router_bias", "adapters.lora", "model.gemma3"),
    *("model.deepseek_v3", "data.packing.best_fit", "data.order.shuffled", "data.bytes", "pipeline.schedules.gpipe"),
    *("experts.all_to_all", "kernels.auto", "checkpoint.staging.overlapped", "trackers.csv", "listeners.summary"),
    *("model.auto", "model.transformers", "model.pattern", "model.kimi_linear", "rewards.regex"),
)


@pytest.mark.parametrize("use", PLACED)
def test_every_kind_of_component_has_a_valid_recipe(use: str, tmp_path: Path) -> None:
    """The smallest recipe with a component is valid, has it in the returned node, and runs on a CPU in float64."""
    source, values, [node] = Subject(use).make_source_values_and_nodes(tmp_path)
    recipe = source.load(values)
    recipe.check(skip_machine_checks=True)
    assert recipe.graph.nodes[node].spec.use == use
    assert recipe.graph.nodes["precision"].settings["compute"] == "float64"
    assert node in recipe.graph.topological_order(["trainer"]) or node == "data.bytes"


def test_a_recipe_becomes_small_and_keeps_its_parts(tmp_path: Path) -> None:
    """A shipped recipe gets small sizes, generated rows, and no final task but exports; words set values before."""
    source, values, nodes = Subject("moe", ["loss.z_loss=0.25"]).make_source_values_and_nodes(tmp_path)
    graph = source.load(values).graph
    model, settings = graph.nodes["model"].settings, graph.nodes["trainer"].settings
    assert (model["hidden_size"], model["num_experts"], settings["steps"], nodes) == (16, 4, 4, [])
    assert graph.nodes["packing"].spec.use == "proving.rows" and graph.nodes["loss"].settings["z_loss"] == 0.25
    assert graph.nodes["trainer"].edges["on_finish"].targets == ("export",)
    text = source.format_with(values, "a comment")
    (tmp_path / "small.toml").write_text(text, "utf-8")
    assert Project.from_package("drawloom").graph(source.load(values).merged).nodes.keys() == graph.nodes.keys()
    assert text.startswith('# a comment\nextends = ["moe"]\n')


def test_a_folder_becomes_small_with_weights_for_all_nodes(tmp_path: Path) -> None:
    """A graft, its teacher and the tokenizer have one small copy of their folder, from which they open."""
    model = dense(num_hidden_layers=4, vocab_size=257, hidden_size=32)
    write_hugging_face_folder(tmp_path / "base", model, OneStage(whole(model)))
    Tokenizer(WordLevel({"a": 0, "<|end|>": 256}, unk_token="a")).save(str(tmp_path / "base/tokenizer.json"))
    (tmp_path / "base/chat_template.jinja").write_text("{{ messages }}")
    words = [f"vars.base={tmp_path / 'base'}", f"corpus.paths=['{tmp_path}/*.txt']", "tokenizer.end_token=<|end|>"]
    (tmp_path / "a.txt").write_text("a a a a")
    source, values, _ = Subject("heal", words).make_source_values_and_nodes(tmp_path / "input")
    recipe = source.load(values | {"run": {"folder": str(tmp_path / "run")}})
    [config] = (tmp_path / "input").rglob("config.json")
    assert json.loads(config.read_text("utf-8"))["hidden_size"] == 16
    assert (config.parent / "chat_template.jinja").is_file()
    with recipe.open(["stages", "teacher", "tokenizer"]) as nodes:
        teacher, student = (stages.local[0].module for stages in (nodes["teacher"]._stages, nodes["stages"]))
    assert torch.equal(teacher.model.norm.weight, student.model.norm.weight)


def test_what_can_not_be_proved_is_an_error_of_the_user(tmp_path: Path) -> None:
    """An unknown component, an unknown node, and a component without a place in a run end with a sentence."""
    with pytest.raises(RecipeError, match="no component is called"):
        Subject("my_lab.nothing").make_source_values_and_nodes(tmp_path)
    with pytest.raises(UserError, match="has no such node"):
        Subject("first_run", nodes=["nothing"]).make_source_values_and_nodes(tmp_path)
    with pytest.raises(UserError, match="leave it out"):
        Subject("loss.dft", nodes=["loss"]).make_source_values_and_nodes(tmp_path)
    with pytest.raises(UserError, match=r"a place there\. Prove a recipe with it, such as pretrain"):
        Subject("pipeline.executor").make_source_values_and_nodes(tmp_path)
    with pytest.raises(UserError, match=r"has no adapters; write .* Prove a recipe with it, such as kto"):
        Subject("loss.kto").make_source_values_and_nodes(tmp_path)


def test_generated_rows_have_different_counts() -> None:
    """Two rows in eight have no target, one has all in its first quarter, some have padding and several documents."""
    batch = ProvingRows(tokenizer=Bytes()).batch("train", range(8))
    trained = batch.targets != IGNORE_INDEX
    assert batch.padding is not None and not (trained & batch.padding).any()
    assert torch.equal(trained, batch.weights > 0)
    counts = trained.sum(1).tolist()
    assert counts[4:6] == [0, 0] and counts[3] > 0 and not trained[3, 4:].any()
    assert batch.padding.any(1).tolist() == [True, False, True, False, False, False, False, True]
    documents = batch.document_ids.max(1).values + 1
    assert int(documents[6]) == 1 and int(documents.max()) > 2
    starts = batch.document_ids.diff(dim=1, prepend=batch.document_ids[:, :1] - 1) > 0
    assert torch.equal(batch.positions == 0, starts)
    # the target is the next token of the same document
    following = batch.tokens.roll(-1, 1)
    assert torch.equal(batch.targets[trained], following[trained])


def test_seeded_faults_are_in_methods_that_exist() -> None:
    """Every fault of the soak test can be seeded, so that a renamed method is noticed before."""
    for fault in FAULTS:
        with fault.context():
            pass
