"""Where the costs of stages come from: units that are given, a plan, or a traced step of a run."""

from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import attrs
import numpy as np

from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.pipeline.program.lowering import with_whole_backwards
from drawloom.components.pipeline.program.timing import Costs, CostTable
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan, plan
from drawloom.components.planning.timeline import peak_of
from drawloom.components.planning.traces import Measured
from drawloom.components.ports.program import Program
from drawloom.graph import UserError
from drawloom.graph.project import Recipe


class CostSource(Protocol):
    """Costs of one model, however it is cut into stages."""

    def costs(self, ranks: int, stages_per_rank: int) -> Costs:
        """Those of every stage of a pipeline."""
        ...

    def memory(self, program: Program) -> Sequence[int] | None:
        """By rank, the most bytes of activations; None if they are not known."""
        ...


@attrs.frozen
class Units:
    """Costs of all layers of a rank, in any unit, which its stages share."""

    given: Costs

    def costs(self, ranks: int, stages_per_rank: int) -> Costs:
        """Those of every stage."""
        return self.given.divided(stages_per_rank)

    def memory(self, program: Program) -> None:
        """None."""


@attrs.frozen(eq=False)
class Traced:
    """Seconds of a traced step; stages of other numbers take evenly from those that were traced."""

    measured: Measured

    @cached_property
    def _table(self) -> CostTable:
        return self.measured.table()

    def costs(self, ranks: int, stages_per_rank: int) -> Costs:
        """Those of every stage, in seconds."""
        return self._table.resampled(ranks * stages_per_rank)

    def memory(self, program: Program) -> None:
        """None: a trace does not say what made the bytes."""


@attrs.frozen(eq=False)
class Planned:
    """Seconds and bytes of a plan, made anew for each number of ranks and stages."""

    recipe: Recipe
    device: DeviceModel
    _plans: dict[tuple[int, int], Plan] = attrs.field(init=False, factory=dict)

    def plan(self, ranks: int, stages_per_rank: int) -> Plan:
        """
        The plan of a pipeline whose backward passes are in two parts, so that it has the costs of both.

        Raises UserError for more stages than layers.
        """
        key = ranks, stages_per_rank
        if key not in self._plans:
            nodes = Nodes.of(self.recipe)
            layers = nodes.settings(nodes.model).get("num_hidden_layers")
            if isinstance(layers, int) and layers < ranks * stages_per_rank:
                raise UserError(f"{layers} layers can't be cut into {ranks * stages_per_rank} stages; take fewer", 2)
            schedule = {"use": "pipeline.schedules.zero_bubble_1p", "stages_per_rank": stages_per_rank}
            values = {nodes.mesh: {"pipeline": ranks}, nodes.schedule: schedule}
            self._plans[key] = plan(self.recipe.with_values(values), self.device)
        return self._plans[key]

    def costs(self, ranks: int, stages_per_rank: int) -> Costs:
        """Those of every stage, in seconds."""
        return self.plan(ranks, stages_per_rank).table

    def memory(self, program: Program) -> list[int]:
        """By rank, the most bytes of activations, without gradients and what it has all the time."""
        costs = self.plan(program.ranks, program.stages // program.ranks).costs
        whole, none = with_whole_backwards(program), dict.fromkeys(costs, 0)
        return [peak_of(whole, rank, costs, none).bytes for rank in range(program.ranks)]


def slices_of(table: CostTable) -> dict[str, object]:
    """The settings of `pipeline.schedules.auto` for these costs, its slices being their stages."""
    forward, _, inputs, weights = table.lengths.mean(0).tolist()
    whole = table.lengths[:, [0, 2, 3]].sum(1)
    found = {"forward": forward, "backward_input": inputs, "backward_weight": weights, "comm": table.comm}
    rounded: dict[str, object] = {name: float(f"{seconds:.4g}") for name, seconds in found.items()}
    return rounded | {"slices": np.round(whole / whole.mean(), 4).tolist()}
