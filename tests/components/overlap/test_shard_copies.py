"""Shards that ranks copy from shared memory; tests/components/parallel compares their results with gathered ones."""

from typing import Any

import pytest

import drawloom
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.overlap.shard_copies import CopiedShards
from drawloom.components.stages.materialized import MaterializedStages
from support import pipelines
from support.joined import mesh_along
from support.processes import run_ranks
from support.qwen3 import cpu_kernels

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "vocab_size": 1024,
}


def _count_bytes(precision: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of shared memory in a run, and in a plan."""
    counts = []
    with mesh_along("data_shard") as (mesh, device):
        for plans in (False, True):
            policy = DtypePolicy(**precision)
            feature = CopiedShards(mesh=mesh, precision=policy)
            stages = MaterializedStages(
                model=Qwen3Dense(kernels=cpu_kernels(), **SIZES),
                loss=pipelines.TemperedLoss(),
                schedule=pipelines.schedule("one_f_one_b"),
                mesh=mesh,
                device=device,
                precision=policy,
                job=pipelines.Job(),
                features=[feature],
            )
            stages.build_meta_stages() if plans else stages.open()
            sizes: Any = {"compute_copies": 0}
            feature.change_device_bytes(sizes)
            counts.append(sizes["compute_copies"])
    return counts[0], counts[1]


@pytest.mark.parametrize("precision", [{}, {"parameter": "bfloat16"}], ids=["float32", "bfloat16"])
def test_plans_count_the_shared_memory(precision: dict[str, Any]) -> None:
    """A plan counts the bytes that a run allocates, with room for gradients if they travel in 16 bits."""
    for allocated, planned in run_ranks(_count_bytes, 2, precision):
        assert planned == pytest.approx(allocated, rel=0.02)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "no shards"),
        (("mesh.data_shard=2", "processes.on_failure=continue"), "do not end when a rank is lost"),
        (("mesh.data_shard=auto",), None),
        (("mesh.context=2",), None),
    ],
)
def test_recipes_without_shards_are_refused(words: tuple[str, ...], why: str | None) -> None:
    """Recipes without shards, and runs that survive losses, are refused with the reason."""
    problems = drawloom.Recipe.load("first_run", "copies.use=overlap.shard_copies", *words).graph.problems
    assert [why is not None and why in str(problem) for problem in problems] == [True] * (why is not None), problems
