"""Problems reported by `check` on stages and their neighbours."""

import json
from pathlib import Path
from typing import Any

import pytest

import drawloom
from support.qwen3 import dense


def test_gradients_that_shards_would_narrow_are_refused() -> None:
    """FSDP keeps the slices of gradients in the dtype of parameters: another one is a problem with shards."""
    narrowing = ("precision.parameter='bfloat16'", "precision.gradient='float32'")
    recipe = drawloom.Recipe.load("first_run", "mesh.data_shard=2", *narrowing)
    (problem,) = [text for text in map(str, recipe.graph.problems) if "sharded parameters" in text]
    assert "'bfloat16'" in problem and "'float32'" in problem
    assert "write parameter = 'float32', or leave gradient out" in problem
    for words in (narrowing, ("mesh.data_shard=2", "precision.parameter='float32'")):
        messages = map(str, drawloom.Recipe.load("first_run", *words).graph.problems)
        assert not [text for text in messages if "sharded parameters" in text]


def problems(recipe: drawloom.Recipe) -> list[str]:
    """Return the problems reported by `check` on ranks along tensor."""
    return [text for text in map(str, recipe.graph.problems) if "'tensor'" in text]


@pytest.mark.parametrize(
    ("recipe", "words", "whys"),
    [
        ("first_run", ("mesh.tensor=2", "model.vocab_size=321"), []),
        ("first_run", ("mesh.tensor=3",), ["num_key_value_heads = 2 is not", "intermediate_size = 512 is not"]),
        ("first_run", ("mesh.tensor=2", "model.vocab_size=1"), ["vocab_size = 1 is less than 2"]),
        ("moe", ("mesh.tensor=2", "model.vocab_size=320"), []),
        ("first_run", ("mesh.tensor=2", "model.new_tokens=1"), ["rows of new tokens"]),
    ],
)
def test_indivisible_models_are_refused_on_tensor_ranks(recipe: str, words: Any, whys: list[str]) -> None:
    """A size that is not divisible is a problem with its number; divisible sizes have none."""
    messages = problems(drawloom.Recipe.load(recipe, *words))
    assert len(messages) == len(whys) and all(why in text for why, text in zip(whys, messages, strict=True)), messages


@pytest.mark.parametrize(
    ("recipe", "words", "why"),
    [
        ("moe", (), None),
        ("moe", ('stages.dispatcher={use="experts.local"}',), "on 2 ranks, and 'experts.local' sends no tokens"),
        ("moe", ("model.num_experts=7",), "can't share the 7 experts of [model] evenly"),
        ("first_run", (), "[model] has no experts"),
    ],
)
def test_indivisible_experts_are_refused(recipe: str, words: Any, why: str | None) -> None:
    """Ranks along expert require a divisible number of experts, and refuse a dispatcher for one rank."""
    sizes = ("mesh.data_shard=2", "mesh.expert=2", "batch.micro_size=8")
    messages = [str(problem) for problem in drawloom.Recipe.load(recipe, *sizes, *words).graph.problems]
    assert (why is None and not messages) or (why and len(messages) == 1 and why in messages[0]), messages


def test_sizes_in_a_config_are_checked_alike(tmp_path: Path) -> None:
    """A model whose sizes are in a config.json is refused by check, not at its start."""
    (tmp_path / "config.json").write_text(json.dumps(dense(num_key_value_heads=1).hugging_face_config()), "utf-8")
    recipe = drawloom.Recipe.load("pretrain").with_values(
        {"model": {"use": "model.auto", "path": str(tmp_path), "weights": False}, "mesh": {"tensor": 2}}
    )
    messages = problems(recipe)
    assert any("num_key_value_heads = 1 is not divisible by 2" in text for text in messages), messages


SHARED_EXPERTS = ("mesh.expert=2", "mesh.data_shard=2")


@pytest.mark.parametrize(
    ("recipe", "words", "whys"),
    [
        ("first_run", ("mesh.data_replicate=2", "schedule.use=pipeline.schedules.zero_bubble_v"), []),
        ("first_run", ("mesh.data_shard=2",), []),
        ("first_run", ("mesh.data_shard=2", "stages.sync_each_microbatch=true"), ["in the CUDA graph of the last"]),
        ("first_run", ("mesh.context=2", "stages.sync_each_microbatch=true"), ["in the CUDA graph of the last"]),
        ("first_run", ("mesh.data_shard=2", "processes.on_failure=continue"), ["can't abort a communicator"]),
        (
            "first_run",
            ("overlap.use=overlap.tensor_products", "overlap.through=memory"),
            ["slots of the shared memory"],
        ),
        ("moe", (*SHARED_EXPERTS, "dispatcher.use=experts.symmetric", "dispatcher.capacity=1.5"), []),
        (
            "moe",
            (*SHARED_EXPERTS, "dispatcher.use=experts.symmetric", "dispatcher.capacity=1.5", "stages.recompute=blocks"),
            ["in every CUDA graph"],
        ),
        ("moe", SHARED_EXPERTS, ["can't wait for the number of rows"]),
        ("first_run", ("mesh.context=2", "mesh.tensor=2", "model.vocab_size=320"), []),
        (
            "finetune_lora",
            ("vars.base=.", "adapters.lora.dropout=0.1"),
            ["[adapters.lora] draws new random numbers for dropout"],
        ),
    ],
)
def test_passes_that_cannot_be_captured_are_refused(recipe: str, words: Any, whys: list[str]) -> None:
    """Graphs serve any mesh and schedule, but no pass that the host takes part in."""
    every = map(str, drawloom.Recipe.load(recipe, "capture.use=pipeline.captured", *words).graph.problems)
    messages = [text for text in every if "can't be captured" in text or "CUDA graph" in text]
    assert len(messages) == len(whys) and all(why in text for why, text in zip(whys, messages, strict=True)), messages


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("capture.use=pipeline.captured",), "passes in CUDA graphs keep their activations in place"),
    ],
)
def test_activations_with_a_fixed_place_are_not_offloaded(words: tuple[str, ...], why: str) -> None:
    """CUDA graphs are refused together with offloading."""
    problems = drawloom.Recipe.load("first_run", "offload.use=pipeline.offloaded", *words).graph.problems
    assert [why in str(problem) for problem in problems] == [True]


OUTER = ("model.num_hidden_layers=6",)
CIRCULAR = ("schedule.use=pipeline.schedules.circular", "executor.use=pipeline.circular.executor")


AUTO = ("schedule.use=pipeline.schedules.auto", "schedule.trials=0", "schedule.slices=[1.0, 1.0, 1.0, 2.0]")


SHORT = (*AUTO, "schedule.memory=1.5", "schedule.stages_per_rank=1", "schedule.activations=[1.0, 1.0, 1.0, 1.0]")
BLOCKS = "schedule.recompute={ blocks = { again = 0.9, kept = 0.1 } }"


def test_explain_shows_the_recomputation_of_stages() -> None:
    """It is the schedule's choice: within the memory of three of four layers both stages recompute."""
    text = drawloom.Recipe.load("pipeline", "model.num_hidden_layers=4", *SHORT, BLOCKS).explain("stages")
    assert (
        "recomputed, by [schedule] if a step has 8 microbatches: blocks in stage 0, one of 2 blocks in stage 1" in text
    )


def test_explain_shows_the_layers_of_stages() -> None:
    """Layers are as the schedule divides them: one less if the last layer costs three."""
    words = (*AUTO, "schedule.slices=[1.0, 1.0, 1.0, 3.0]", "schedule.stages_per_rank=1")
    text = drawloom.Recipe.load("pipeline", "model.num_hidden_layers=4", *words).explain("stages")
    assert "layers of stages, by [schedule]: 3, 1" in text


def test_explain_says_which_layers_are_outside_of_stages() -> None:
    """With four of six layers in the circular pipeline, every rank has the other two."""
    words = (*CIRCULAR, *OUTER, "schedule.pipeline_parallel_layers=4")
    text = drawloom.Recipe.load("pipeline", *words).explain("stages")
    assert "layers 4 to 5: on every pipeline rank, for its share of the microbatches" in text


@pytest.mark.parametrize(
    ("words", "whys"),
    [
        (AUTO, []),
        (
            (*AUTO, "stages.head_layer_cost=2"),
            ["by its own layer costs; write head_layer_cost = 0, and"],
        ),
        ((*SHORT, BLOCKS), []),
        (
            (*SHORT, BLOCKS, "stages.recompute=selective"),
            ['[schedule] sets recompute policies by stage; write recompute = "none", or leave it out in [schedule]'],
        ),
        (
            (*SHORT, "schedule.recompute={ blocks = { again = [0.9], kept = 0.1 } }"),
            ["slices has 4 values, and blocks.again has 1; write as many values in both"],
        ),
        ((*AUTO, "model.num_hidden_layers=6"), ["6 layers are not divisible into 4 slices"]),
    ],
)
def test_a_schedule_that_cuts_the_stages_suits_the_model(words: tuple[str, ...], whys: list[str]) -> None:
    """Costs of embedding and head are written once; the layers are a multiple of the slices."""
    given = ("model.num_hidden_layers=4", *words)
    messages = [str(problem) for problem in drawloom.Recipe.load("pipeline", *given).graph.problems]
    assert len(messages) == len(whys) and all(why in text for why, text in zip(whys, messages, strict=True)), messages


@pytest.mark.parametrize(
    ("words", "whys"),
    [
        (CIRCULAR, []),
        (CIRCULAR[:1], ["[executor] [schedule] places embedding and head on every rank"]),
        (CIRCULAR[1:], ["[schedule] [executor] runs the circular pipeline's own program"]),
        ((*CIRCULAR, "capture.use=pipeline.captured"), ["[capture] acts around a program"]),
        ((*CIRCULAR, "offload.use=pipeline.offloaded"), ["[offload] acts around a program"]),
        ((*CIRCULAR, "stages.head_layer_cost=2"), ["the cost moves no layers; write head_layer_cost = 0"]),
        ((*CIRCULAR, "mesh.tensor=2", "model.vocab_size=320"), []),
        ((*CIRCULAR, *OUTER, "schedule.pipeline_parallel_layers=4"), []),
        (
            (*CIRCULAR, *OUTER, "schedule.pipeline_parallel_layers=7"),
            ["pipeline_parallel_layers = 7 is more than the model's 6 layers; write a multiple of 4"],
        ),
        (
            (*CIRCULAR, *OUTER, "schedule.pipeline_parallel_layers=3"),
            ["leaves some of 4 stages (2 ranks with 2 each) without a layer; write 4 or more"],
        ),
    ],
)
def test_features_missing_in_the_circular_pipeline_are_refused(words: tuple[str, ...], whys: list[str]) -> None:
    """Schedule and executor belong together; CUDA graphs, and costs for ends on no stage, are refused."""
    messages = [str(problem) for problem in drawloom.Recipe.load("pipeline", *words).graph.problems]
    assert len(messages) == len(whys) and all(why in text for why, text in zip(whys, messages, strict=True)), messages
