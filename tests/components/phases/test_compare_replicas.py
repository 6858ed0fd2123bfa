"""Comparison of replicas' parameters."""

from pathlib import Path
from typing import Any

import pytest

from drawloom.components.checkpoint.commit import list_checkpoints, step_of_checkpoint
from drawloom.components.phases.compare_replicas import describe_differing_replicas
from support.runs import drawloom, write_corpus

FLIP = '''
import torch

from drawloom import component, setting
from drawloom.ports import Mesh, Parameters, Step


@component(reads=("weights",), changes=("weights",), impact="safe")
class Flip:
    """A flip of the lowest bit of one weight of rank 1 in step 3."""

    mesh: Mesh
    parameters: Parameters

    def run_phase(self, step: Step) -> None:
        *_, (name, parameter) = self.parameters.named_parameters()
        if step.index == 3 and self.mesh.world.rank == 1:
            parameter.data.view(-1).view(dtype=torch.int32)[1] ^= 1
'''
WORDS = ("compare.use=phases.compare_replicas", "compare.every=1", "edit.trainer.phases.before.@report=@compare")
FLIPPED = ("--import=flip.py", "flip.use=flip", "edit.trainer.phases.before.@report=['@flip', '@compare']")


def test_one_flipped_bit_ends_the_run_before_it_is_saved(tmp_path: Path) -> None:
    """Replicas are equal in steps 1 and 2; in step 3 rank 1 of three is named with the parameter."""
    write_corpus(tmp_path)
    (tmp_path / "flip.py").write_text(FLIP, "utf-8")
    words = (*WORDS[:2], *FLIPPED, "batch.global_size=3", "batch.micro_size=1", "checkpoint.every=1")
    outcomes = drawloom(tmp_path, "run", "tiny.toml", *words, ranks=3)
    text = "".join(outcome.text for outcome in outcomes)
    assert {outcome.code for outcome in outcomes} == {1}, text
    assert text.count("after the update of step 3, rank 1 has other bits than the other replicas in ") == 1
    assert [step_of_checkpoint(path) for path in list_checkpoints(tmp_path / "runs/tiny/checkpoints")] == [1, 2]


@pytest.mark.parametrize(
    ("digests", "who"),
    [
        ("aab", "rank 12 has other bits"),
        ("abb", "rank 10 has other bits"),
        ("abcaa", "rank 11, 12 has other bits"),
        ("ab", "the replicas of ranks 10, 11 have different bits"),
        ("aabb", "the replicas of ranks 10, 11, 12, 13 have different bits"),
    ],
)
def test_the_minority_is_named(digests: str, who: str) -> None:
    """Without a majority all replicas are named; equal parameters are not."""
    by_replica: list[dict[str, Any]] = [
        {"rank": 10 + number, "digests": {"equal": "x", "weight": digest}} for number, digest in enumerate(digests)
    ]
    message = describe_differing_replicas(by_replica)
    assert message.startswith(who) and " in weight: " in message and "equal" not in message
