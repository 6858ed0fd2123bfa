"""The circular pipeline as an executor; tests/meshes/test_steps.py compares its steps with one process's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.loss.next_token import NextToken
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.pipeline.circular import executor as circular
from drawloom.components.pipeline.circular.executor import CircularExecutor, StagePasses
from drawloom.components.ports.pipeline import sum_losses_and_weights
from drawloom.components.ports.program import iterate_actions
from drawloom.components.stages.materialized import MaterializedStages
from drawloom.graph import UserError
from support import pipelines
from support.joined import mesh_along
from support.processes import run_ranks
from support.qwen3 import cpu_kernels
from support.steps import train

RANKS, REPEATS = 2, 2
Work = tuple[str, int, int]
"""An op, a stage, and a microbatch."""


def on_ranks(use: Callable[[CircularExecutor, int], Any], *delays: bool) -> list[Any]:
    """Return the results of `use` on four layers' executor and this rank, for both values of `delayed`."""
    with mesh_along("pipeline") as (mesh, device):
        sizes: dict[str, Any] = {
            "num_hidden_layers": 4,
            "vocab_size": pipelines.VOCABULARY,
            "hidden_size": 16,
            "head_dim": 8,
        }
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
        model = Qwen3Dense(kernels=cpu_kernels(), **sizes | {"tie_word_embeddings": True})
        objective, schedule = NextToken(), pipelines.schedule("circular", stages_per_rank=REPEATS)
        common: dict[str, Any] = {"mesh": mesh, "device": device, "schedule": schedule}
        stages = MaterializedStages(
            model=model, loss=objective, precision=DtypePolicy(parameter="float64"), job=pipelines.Job(), **common
        )
        stages.open()
        parts: dict[str, Any] = {"stages": stages, "objective": objective}
        results = []
        for delayed in delays:
            executor = CircularExecutor(**parts, **common, delayed=delayed)
            executor.open()
            results.append(use(executor, mesh.indices.pipeline))
            for _, parameter in stages.named_parameters():
                parameter.grad = None
        return results


def works(executor: CircularExecutor, _rank: int) -> list[Work]:
    """Return a rank's actions in a step with four microbatches, in order, and its message counts per wait."""
    done: list[Work] = []

    class Watched(StagePasses):
        def run_forward(self, stage: int, microbatch: int, given: torch.Tensor) -> torch.Tensor:
            done.append(("F", stage, microbatch))
            return super().run_forward(stage, microbatch, given)

        def run_backward(self, stage: int, microbatch: int, grad: torch.Tensor) -> torch.Tensor | None:
            done.append(("B", stage, microbatch))
            return super().run_backward(stage, microbatch, grad)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(circular, "StagePasses", Watched)
        train(executor, pipelines.batches(4))
    return done


def test_ranks_run_the_program_of_the_schedule_and_share_the_ends_of_the_model() -> None:
    """
    A rank's layers run in the order of `pipeline.schedules.circular`, forwards and backwards, delayed or not. Embedding
    and head run on all ranks for their part of the microbatches.
    """
    program = pipelines.schedule("circular", stages_per_rank=REPEATS).program(RANKS, 4)
    for rank, results in enumerate(run_ranks(on_ranks, RANKS, works, False, True)):
        wanted = [
            (action.op, action.stage + 1, action.microbatch) for action in iterate_actions(program.rank_program(rank))
        ]
        mine = range(2 * rank, 2 * rank + 2)
        last = RANKS * REPEATS + 1
        for done in results:
            assert [work for work in done if work[1] not in (0, last)] == wanted
            ends = [*(("F", 0, n) for n in mine), *(("F", last, n) for n in mine)]
            assert sorted(work for work in done if work[1] in (0, last)) == sorted(
                [*ends, *(("B", *end[1:]) for end in ends)]
            )


def losses(executor: CircularExecutor, _rank: int) -> tuple[Any, Any, bool]:
    """Of a step its sums and losses by microbatch, and whether gradients were added."""
    state = train(executor, pipelines.batches(3))
    by_microbatch = [state["losses"][name].tolist() for name in ("loss", "weight")]
    grads = [stage.module for stage in executor.stages.local]
    return (
        sum_losses_and_weights(state).tolist(),
        by_microbatch,
        any(parameter.grad is not None for module in grads for parameter in module.parameters()),
    )


def test_the_last_rank_has_the_losses_of_all() -> None:
    """All microbatch losses and weights are on the last layer's rank, though other ranks compute some."""
    [(first, _, _)], [(sums, by_microbatch, trained)] = run_ranks(on_ranks, RANKS, losses, False)
    assert first == [0.0, 0.0] and trained
    wanted = [float(batch.weights.double().sum()) for batch in pipelines.batches(3)]
    assert by_microbatch[1] == pytest.approx(wanted)
    assert sums == pytest.approx([sum(by_microbatch[0]), sum(wanted)])


def refusal(executor: CircularExecutor, _rank: int) -> str:
    """Return the error for a loss over several layers' hidden states."""
    object.__setattr__(executor, "objective", pipelines.StatesLoss())
    with pytest.raises(UserError) as caught:
        train(executor, pipelines.batches(2))
    return str(caught.value)


def test_stages_that_give_several_tensors_are_refused() -> None:
    """One tensor travels; a loss over several layers' hidden states is refused with an executor to write."""
    [[message]] = run_ranks(on_ranks, 1, refusal, False)
    assert "returns a tuple" in message and 'use = "pipeline.executor"' in message
