"""The circular pipeline as an executor; tests/meshes/test_steps.py compares its steps with one process's."""

from collections import defaultdict
from itertools import product
from typing import Any

import pytest

from drawloom.components.distributed.planned import PlannedMesh
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.loss.next_token import NextToken
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.pipeline.circular.executor import CircularExecutor
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.simulation.simulator import get_event_key, simulate_events
from drawloom.components.ports.distributed import PerDimension
from drawloom.components.ports.pipeline import sum_losses_and_weights
from drawloom.components.ports.program import Program, RankProgram, iterate_actions
from drawloom.components.stages.materialized import MaterializedStages
from support import pipelines
from support.joined import mesh_along
from support.processes import run_ranks
from support.qwen3 import cpu_kernels
from support.steps import train


def lower(program: Program, rank: int, schedule: Any) -> RankProgram:
    """Return a rank's program with embedding and head, as its executor runs it."""
    sizes = PerDimension(pipeline=program.ranks)
    mesh = PlannedMesh.from_settings(sizes.settings(), program.ranks).seen_from_pipeline_rank(rank)
    parts: Any = {"stages": None, "schedule": schedule, "objective": None, "mesh": mesh, "device": None}
    return CircularExecutor(**parts)._lower_training_program(program)


def test_ranks_run_the_program_of_the_schedule_and_share_the_ends_of_the_model() -> None:
    """
    A rank's layers run in the order of `pipeline.schedules.circular`, and embedding and head on all ranks for their
    part of the microbatches. Messages are received in the order in which they are sent, and no rank waits forever.
    """
    for ranks, repeats, microbatches in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 5, 8)):
        schedule = pipelines.schedule("circular", stages_per_rank=repeats)
        program, head = schedule.program(ranks, microbatches), ranks * repeats + 1
        lines = [lower(program, rank, schedule) for rank in range(ranks)]
        simulate_events(lines, Costs(comm=0.5), "direction")
        sent, received = defaultdict(list), defaultdict(list)
        ends = []
        for rank, line in enumerate(lines):
            actions = [*iterate_actions(line)]
            layers = [action for action in actions if action.peer is None and 0 < action.stage < head]
            wanted = [*iterate_actions(program.rank_program(rank))]
            assert [(action.op, action.stage - 1, action.microbatch) for action in layers] == [
                (action.op, action.stage, action.microbatch) for action in wanted
            ]
            own = [(action.op, action.stage, action.microbatch) for action in actions if action.stage in (0, head)]
            ends += [work for work in own if work[0] in "FB"]
            assert len({microbatch for _, _, microbatch in own}) <= -(-microbatches // ranks)
            for action in actions:
                if action.op.startswith("SEND"):
                    sent[rank, action.peer].append(get_event_key(action))
                elif action.op.startswith("RECV"):
                    received[action.peer, rank].append(get_event_key(action))
        assert sent == received
        assert sorted(ends) == sorted(product("FB", (0, head), range(microbatches)))


def losses() -> tuple[Any, Any, bool]:
    """Of a step its sums and losses by microbatch, and whether gradients were added."""
    with mesh_along("pipeline") as (mesh, device):
        sizes: dict[str, Any] = {
            "num_hidden_layers": 4,
            "vocab_size": pipelines.VOCABULARY,
            "hidden_size": 16,
            "head_dim": 8,
        }
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
        model = Qwen3Dense(kernels=cpu_kernels(), **sizes | {"tie_word_embeddings": True})
        objective, schedule = NextToken(), pipelines.schedule("circular", stages_per_rank=2)
        common: dict[str, Any] = {"mesh": mesh, "device": device, "schedule": schedule}
        stages = MaterializedStages(
            model=model, loss=objective, precision=DtypePolicy(parameter="float64"), job=pipelines.Job(), **common
        )
        stages.open()
        executor = CircularExecutor(stages=stages, objective=objective, **common)
        executor.open()
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
    (first, _, _), (sums, by_microbatch, trained) = run_ranks(losses, 2)
    assert first == [0.0, 0.0] and trained
    wanted = [float(batch.weights.double().sum()) for batch in pipelines.batches(3)]
    assert by_microbatch[1] == pytest.approx(wanted)
    assert sums == pytest.approx([sum(by_microbatch[0]), sum(wanted)])
