"""Where the costs of stages come from: units that are given, a plan, or a traced step of a run."""

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.pipeline.program.builders import loop
from drawloom.components.pipeline.program.list_scheduling import FORWARDS_FIRST, Task, list_schedule
from drawloom.components.pipeline.program.lowering import with_whole_backwards
from drawloom.components.pipeline.program.timing import Costs, CostTable
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan, PlanCache, RankMemory, plan
from drawloom.components.planning.timeline import peak_of
from drawloom.components.planning.traces import Measured
from drawloom.components.ports.program import Program
from drawloom.graph import UserError
from drawloom.graph.project import Recipe

LEAST = 1e-9
"""The least seconds of a slice, and what seconds are rounded to."""

ENOUGH = 2
"""Times the activations of a microbatch in all layers: ZB-H2 holds no more, and with more no bubble is smaller."""


class CostSource(Protocol):
    """
    Costs of one model, however it is cut into stages.

    Stages have the `sizes` that are given, in slices of the model that cost what `slices` says, or are those of a run.
    """

    def costs(self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None) -> Costs:
        """Those of every stage of a pipeline."""
        ...

    def memory(self, program: Program, sizes: Sequence[int] | None = None) -> Sequence[int] | None:
        """By rank, the most bytes of activations; None if they are not known."""
        ...

    def slices(self, ranks: int) -> dict[str, Any]:
        """The settings of `pipeline.schedules.auto` for these costs."""
        ...


@attrs.frozen
class Units:
    """Costs of all layers of a rank, in any unit, which its stages share."""

    given: Costs

    def costs(self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None) -> Costs:
        """Those of every stage."""
        return self.given.divided(stages_per_rank)

    def memory(self, program: Program, sizes: Sequence[int] | None = None) -> None:
        """None."""

    def slices(self, ranks: int) -> dict[str, Any]:
        """None: stages share what a rank costs evenly."""
        return {name: getattr(self.given, name) for name in ("forward", "backward_input", "backward_weight", "comm")}


@attrs.frozen(eq=False)
class Traced:
    """Seconds of a traced step; stages of other numbers take evenly from those that were traced."""

    measured: Measured

    @cached_property
    def _table(self) -> CostTable:
        return self.measured.table()

    def costs(self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None) -> Costs:
        """Those of every stage, in seconds."""
        return self._table.resampled(sizes or (1,) * (ranks * stages_per_rank))

    def memory(self, program: Program, sizes: Sequence[int] | None = None) -> None:
        """None: a trace does not say what made the bytes."""

    def slices(self, ranks: int) -> dict[str, Any]:
        """Two for each rank; what a stage costs besides its layers is not known."""
        return slices_of(self._table.resampled((1,) * (2 * ranks)))


@attrs.frozen
class _Cut:
    """A schedule of backward passes in two parts for stages of given layers, wherever they are placed."""

    placement: tuple[int, ...]
    sizes: tuple[int, ...]

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        return self.placement

    def layers_by_stage(self, ranks: int, layers: int) -> tuple[int, ...]:
        return self.sizes

    def program(self, ranks: int, microbatches: int) -> Program:
        activations = (1.0,) * len(self.placement)
        task = Task(self.placement, microbatches, Costs(), activations, microbatches * sum(activations))
        return list_schedule(task, FORWARDS_FIRST)


@attrs.frozen(eq=False)
class Planned:
    """Seconds and bytes of a plan, made anew for each number of ranks and stages."""

    recipe: Recipe
    device: DeviceModel
    cache: PlanCache | None = None
    _plans: dict[Hashable, Plan] = attrs.field(init=False, factory=dict)

    def plan(self, ranks: int, stages_per_rank: int, cut: _Cut | None = None) -> Plan:
        """
        The plan of a pipeline whose backward passes are in two parts, so that it has the costs of both.

        Its stages are those of a `cut`, or have as many layers as in the recipe. Raises UserError for more stages than
        layers.
        """
        key = cut or (ranks, stages_per_rank)
        if key not in self._plans:
            nodes = Nodes.of(self.recipe)
            layers = nodes.settings(nodes.model).get("num_hidden_layers")
            if isinstance(layers, int) and layers < ranks * stages_per_rank:
                raise UserError(f"{layers} layers can't be cut into {ranks * stages_per_rank} stages; take fewer", 2)
            schedule = {"use": "pipeline.schedules.zero_bubble_1p", "stages_per_rank": stages_per_rank}
            values = {nodes.mesh: {"pipeline": ranks}, nodes.schedule: schedule}
            self._plans[key] = plan(self.recipe.with_values(values), self.device, None, self.cache, cut)
        return self._plans[key]

    def _cut(self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None) -> Plan:
        cut = None if sizes is None else _Cut(loop(ranks, stages_per_rank), tuple(sizes))
        return self.plan(ranks, stages_per_rank, cut)

    def costs(self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None) -> Costs:
        """Those of every stage, in seconds."""
        return self._cut(ranks, stages_per_rank, sizes).table

    def memory(self, program: Program, sizes: Sequence[int] | None = None) -> list[int]:
        """By rank, the most bytes of activations, without gradients and what it has all the time."""
        costs = self._cut(program.ranks, program.stages // program.ranks, sizes).costs
        whole, none = with_whole_backwards(program), dict.fromkeys(costs, 0)
        return [peak_of(whole, rank, costs, none).bytes for rank in range(program.ranks)]

    def slices(self, ranks: int) -> dict[str, Any]:
        """
        One for each layer, in seconds; if the device's memory is known, in bytes, too, and with a limit: what the
        device has left, or what is enough.

        They are of a plan with a stage for each layer; what its stages cost together beyond those of a plan with a
        stage for each rank is what every stage costs besides.
        """
        one = self.plan(ranks, 1)
        count = one.layers
        each = self.plan(ranks, 1, _Cut(tuple(layer * ranks // count for layer in range(count)), (1,) * count))
        more = each.table.lengths.sum(0) - one.table.lengths.sum(0)
        per_stage = np.clip(more / max(1, count - ranks), 0, 0.9 * each.table.lengths.min(0))
        found = slices_of(attrs.evolve(one.table, lengths=each.table.lengths - per_stage))
        found["per_stage"] = _rounded(per_stage)
        if self.device.memory:
            held = [float(each.costs[stage].passes["F"].held_bytes) for stage in range(count)]
            room = self.device.memory - max(_besides_activations(one, rank) for rank in one.memory)
            found |= {"activations": held, "memory": max(1.0, min(float(room), ENOUGH * sum(held)))}
        return found


def _besides_activations(planned: Plan, rank: RankMemory) -> int:
    """Bytes of a rank besides activations: what it has all the time, gradients, and what an action needs at once."""
    passes = [(op, part) for stage in rank.stages for op, part in planned.costs[stage].passes.items()]
    rises = (part.rise - (part.held_bytes if op == "F" else 0) for op, part in passes)
    return sum(rank.kept.values()) + rank.gradients + sum(rank.buffers.values()) + max(rises)


def slices_of(table: CostTable) -> dict[str, Any]:
    """The settings of `pipeline.schedules.auto` for these costs, its slices being their stages."""
    # What takes no time, such as gradients of weights that are frozen, could be anywhere in a schedule.
    lengths = np.maximum(table.lengths, LEAST)
    return {"comm": round(table.comm, 9), "slices": [_rounded(each) for each in lengths]}


def _rounded(costs: NDArray[np.float64]) -> list[float]:
    return [round(float(cost), 9) for cost in costs]
