"""Microbatches replayed on another rank."""

from pathlib import Path

import pytest

from drawloom.components.listeners.replay import ReplayDifference, describe_difference, find_earliest_rank_disagreement
from support.runs import drawloom, rows, write_corpus

FAULTS = '''
import os

import torch

from drawloom import component, setting
from drawloom.ports import Mesh, Step, Stages


@component(impact="safe")
class Fault:
    """One flipped bit on rank 1 in step 3: in a weight, or once in an activation or its gradient in layer 1."""

    mesh: Mesh
    stages: Stages
    kind: str = setting(default="weight", doc="weight, activation or gradient")

    def run_phase(self, step: Step) -> None:
        if step.index != 3 or self.mesh.world.rank != 1:
            return
        modules = self.stages.local[0].module.named_modules()
        layer = next(module for name, module in modules if name.endswith("layers.1"))
        if self.kind == "weight":
            self.flip(next(layer.parameters()))
        elif self.kind == "activation":
            def flip_output(module, inputs, output):
                hook.remove()
                return self.flip(output)
            hook = layer.register_forward_hook(flip_output, prepend=True)
        else:
            def flip_gradient(module, inputs):
                hook.remove()
                inputs[0].register_hook(lambda gradient: self.flip(gradient.clone()))
            hook = layer.register_forward_pre_hook(flip_gradient, prepend=True)

    def flip(self, tensor):
        """Flip the lowest bit of one number in place."""
        tensor.data.view(-1).view(dtype=torch.int32)[1] ^= 1
        return tensor
'''
WORDS = (
    "run",
    "tiny.toml",
    "model.num_hidden_layers=3",
    "trainer.steps=4",
    "batch.global_size=12",
    "batch.micro_size=2",
    "trainer.on_finish=[]",
    "randomness.deterministic=true",  # a GPU is not replayed otherwise
)
REPLAY = ("listeners.replay.use=listeners.replay", "listeners.replay.every=1")
FAULT = ("--import=fault.py", "fault.use=fault", "edit.trainer.phases.before.@forward_backward=@fault")
ERROR = "silent data corruption"


def _run(folder: Path, name: str, *words: str, ranks: int) -> str:
    """Run the recipe on several ranks, and return rank 0's output."""
    outcomes = drawloom(folder, *WORDS, f"run.name={name}", *words, ranks=ranks)
    assert {outcome.code for outcome in outcomes} == {0}, "".join(outcome.text for outcome in outcomes)
    return outcomes[0].text


def _losses(folder: Path, name: str) -> list[object]:
    return [row["loss"] for row in rows(folder / "runs" / name)]


def test_replays_change_no_loss_and_a_flipped_weight_is_located(tmp_path: Path) -> None:
    """Three honest ranks agree; a flipped bit in rank 1's weight names step, rank and layer."""
    write_corpus(tmp_path)
    (tmp_path / "fault.py").write_text(FAULTS, "utf-8")
    _run(tmp_path, "plain", ranks=3)
    assert ERROR not in _run(tmp_path, "honest", *REPLAY, ranks=3)
    assert _losses(tmp_path, "honest") == _losses(tmp_path, "plain")
    text = _run(tmp_path, "flipped", *REPLAY, *FAULT, ranks=3)
    assert text.count(ERROR) == 2  # steps 3 and 4
    assert "in step 3, rank 1 computes a microbatch with other results than the other ranks" in text
    assert "the first difference is the output of model.layers.1, in the forward pass" in text
    assert "resume from a checkpoint from step 2 or before" in text


@pytest.mark.parametrize(
    ("kind", "tensor", "shards"),
    [
        ("activation", "the output of model.layers.1, in the forward pass", 2),
        ("gradient", "the gradient of the input of model.layers.1, in the backward pass", 1),
    ],
)
def test_a_passing_fault_is_located(tmp_path: Path, kind: str, tensor: str, shards: int) -> None:
    """With two ranks (FSDP or DDP), the one with two results is named, in one step."""
    write_corpus(tmp_path)
    (tmp_path / "fault.py").write_text(FAULTS, "utf-8")
    words = (*REPLAY, *FAULT, f"fault.kind={kind}", f"mesh.data_shard={shards}")
    text = _run(tmp_path, "flipped", *words, ranks=2)
    assert text.count(ERROR) == 1
    assert "in step 3, rank 1 computes the same microbatch twice with different results" in text
    assert f"the first difference is {tensor}" in text, text


OWN, OTHER = {"a": "1", "b": "2"}, {"a": "1", "b": "3"}


@pytest.mark.parametrize(
    ("results", "suspects", "repeats"),
    [
        ([[OWN, OWN, OWN], [OWN, OWN, OTHER], [OWN, OWN, OWN]], [11], True),
        ([[OWN, OWN, OWN], [OTHER, OWN, OWN], [OWN, OWN, OWN]], [11], True),
        ([[OWN, OWN, OWN], [OWN, OTHER, OWN]], [], True),
        ([[OWN, OWN, OWN], [OTHER, OWN, OWN]], [11], False),
        ([[OWN, OTHER, OWN]], [10], False),
    ],
)
def test_the_rank_without_a_majority_is_a_suspect(
    results: list[list[dict[str, str]]], suspects: list[int], repeats: bool
) -> None:
    """Two of three ranks outvote one; among two, only a rank with two different results is a suspect."""
    difference = find_earliest_rank_disagreement([10, 11, 12][: len(results)], results)
    assert difference == ReplayDifference("b", difference.ranks, suspects, repeats, position=1) if difference else False
    assert find_earliest_rank_disagreement([10, 11, 12], [[OWN] * 3] * 3) is None


def test_the_earliest_difference_of_a_pipeline_is_reported() -> None:
    """A forward pass begins at the first stage, and a backward pass at the last one; other ranks see a fault later."""
    forward, backward = "the output of layers.0", "the gradient of the input of layers.0"
    by_stage = [
        (1, ReplayDifference(forward, [2, 3], [3])),
        (0, ReplayDifference(forward, [0, 1], [])),
        (0, ReplayDifference(backward, [0], [0])),
    ]
    assert "in step 7, ranks 0, 1 compute the same microbatch with different results" in describe_difference(
        7, 0, by_stage
    )
    by_stage = [(stage, ReplayDifference(backward, [stage], [stage])) for stage in (0, 1)]
    assert "rank 1 computes a microbatch" in describe_difference(7, 5, by_stage)
    later = ReplayDifference("the output of layers.3", [0, 2], [0], position=3)
    text = describe_difference(7, 5, [(0, later), (0, ReplayDifference(forward, [1, 3], [1], position=0))])
    assert "rank 1 computes a microbatch" in text and forward in text
