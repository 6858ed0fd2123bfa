"""Simulated ranks' sharded parameters; tests/components/planning/test_plan.py compares them with real ranks."""

import torch
from torch import nn

from drawloom.components.distributed.planned import PlannedMesh
from drawloom.components.distributed.precision import DtypePolicy
from drawloom.components.parallel.fsdp import (
    GatheredBytes,
    SlicedStore,
    count_largest_unit,
)


def _module() -> nn.ModuleDict:
    with torch.device("meta"):
        return nn.ModuleDict({"table": nn.Linear(4, 5, bias=False), "block": nn.Linear(4, 6)})


def test_a_rank_has_its_part_of_the_first_dimension() -> None:
    """All parts but the last have the same size; layers compute with whole parameters in the compute dtype."""
    module = _module()
    ranks = PlannedMesh.from_settings({"data_shard": 2}, 2).group("data_shard")
    store = SlicedStore.from_sliced_modules(
        [module], lambda _: [module["block"]], ranks, DtypePolicy(compute="bfloat16"), gathers_per_block=True
    )
    shapes = {name: tuple(part.shape) for name, part in store.masters.items()}
    assert shapes == {"table.weight": (3, 4), "block.weight": (3, 4), "block.bias": (3,)}
    assert store.slices["table.weight"].shape == (5, 4)
    assert [parameter.dtype for parameter in module.parameters()] == [torch.bfloat16] * 3
    assert store.local_bytes(next(module["table"].parameters())) == 3 * 4 * 4
    assert store.gathered == [GatheredBytes(5 * 4 * 2, [30 * 2])]
    assert store.device_bytes() == {"masters": 0, "compute_copies": 40 + 2 * 60}


def test_the_largest_unit_is_reduced_by_itself() -> None:
    """The largest unit is a block, or the parameters outside all blocks."""
    module = _module()
    assert count_largest_unit(module, [module["block"]]) == 30
    assert count_largest_unit(module, []) == 50
