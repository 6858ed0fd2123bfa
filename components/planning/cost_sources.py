"""Where the costs of stages come from: units that are given, a plan, or a traced step of a run."""

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.parallel.pipeline import PipelineDimension
from drawloom.components.pipeline.program.builders import loop
from drawloom.components.pipeline.program.list_scheduling import FORWARDS_FIRST, Task, list_schedule
from drawloom.components.pipeline.program.lowering import with_whole_backwards
from drawloom.components.pipeline.program.partition import even
from drawloom.components.pipeline.program.recomputation import repeated
from drawloom.components.pipeline.program.timing import Costs, CostTable
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan, PlanCache, RankMemory, plan
from drawloom.components.planning.stage_costs import Passes
from drawloom.components.planning.timeline import peak_of
from drawloom.components.planning.traces import TracedStep
from drawloom.components.ports.program import Program
from drawloom.components.ports.stages import Recompute
from drawloom.graph import UserError
from drawloom.graph.project import Recipe

LEAST = 1e-9
"""The least seconds of a slice, and what seconds are rounded to."""

POLICIES: tuple[Literal["selective", "blocks"], ...] = ("selective", "blocks")
"""What a stage may recompute, besides one of some blocks."""

ENOUGH = 2
"""Times the activations of a microbatch in all layers: ZB-H2 holds no more, and with more no bubble is smaller."""


class CostSource(Protocol):
    """
    Costs of one model, however it is cut into stages.

    Stages have the `sizes` that are given, in slices of the model that cost what `slices` says, or are those of a run.
    """

    def costs(
        self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None, recompute: Sequence[Recompute] = ()
    ) -> Costs:
        """Those of every stage of a pipeline, which may `recompute`."""
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

    def costs(
        self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None, recompute: Sequence[Recompute] = ()
    ) -> Costs:
        """Those of every stage; what is recomputed takes its part of a forward."""
        costs = self.given.divided(stages_per_rank)
        if not recompute:
            return costs
        again = costs.forward * np.array([repeated(policy) for policy in recompute])
        each = [costs.forward + 0 * again, costs.backward + again, costs.backward_input + again]
        return CostTable(**attrs.asdict(costs), lengths=np.stack([*each, costs.backward_weight + 0 * again], axis=1))

    def memory(self, program: Program, sizes: Sequence[int] | None = None) -> None:
        """None."""

    def slices(self, ranks: int) -> dict[str, Any]:
        """None: stages share what a rank costs evenly."""
        return {name: getattr(self.given, name) for name in ("forward", "backward_input", "backward_weight", "comm")}


@attrs.frozen(eq=False)
class Traced:
    """Seconds of a traced step; stages of other numbers take evenly from those that were traced."""

    measured: TracedStep

    @cached_property
    def _table(self) -> CostTable:
        return self.measured.table()

    def costs(
        self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None, recompute: Sequence[Recompute] = ()
    ) -> Costs:
        """Those of every stage, in seconds, among them what the run has recomputed."""
        return self._table.resampled(sizes or (1,) * (ranks * stages_per_rank))

    def memory(self, program: Program, sizes: Sequence[int] | None = None) -> None:
        """None: a trace does not say what made the bytes."""

    def slices(self, ranks: int) -> dict[str, Any]:
        """Two for each rank; what a stage costs besides its layers is not known."""
        return slices_of(self._table.resampled((1,) * (2 * ranks)))


@attrs.frozen
class PlacedSchedule:
    """A schedule of backward passes in two parts for stages of given layers and policies, wherever they are placed."""

    placement: tuple[int, ...]
    sizes: tuple[int, ...]
    recompute: tuple[Recompute, ...] = ()

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        return self.placement

    def layers_by_stage(self, ranks: int, layers: int) -> tuple[int, ...]:
        return self.sizes

    def program(self, ranks: int, microbatches: int) -> Program:
        activations = (1.0,) * len(self.placement)
        task = Task(self.placement, microbatches, Costs(), activations, microbatches * sum(activations))
        return attrs.evolve(list_schedule(task, FORWARDS_FIRST), recompute=self.recompute)


@attrs.frozen(eq=False)
class Planned:
    """Seconds and bytes of a plan, made anew for each number of ranks and stages."""

    recipe: Recipe
    device: DeviceModel
    cache: PlanCache | None = None
    _plans: dict[Hashable, Plan] = attrs.field(init=False, factory=dict)

    def plan(self, ranks: int, stages_per_rank: int, cut: PlacedSchedule | None = None) -> Plan:
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
            values = {nodes.mesh: {PipelineDimension.name: ranks}, nodes.schedule: schedule}
            self._plans[key] = plan(self.recipe.with_values(values), self.device, None, self.cache, cut)
        return self._plans[key]

    def _cut(
        self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None, recompute: Sequence[Recompute]
    ) -> Plan:
        if sizes is None and not recompute:
            return self.plan(ranks, stages_per_rank)
        placement = loop(ranks, stages_per_rank)
        sizes = sizes or even(self.plan(ranks, 1).layers, len(placement))
        return self.plan(ranks, stages_per_rank, PlacedSchedule(placement, tuple(sizes), tuple(recompute)))

    def costs(
        self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None, recompute: Sequence[Recompute] = ()
    ) -> Costs:
        """Those of every stage, in seconds."""
        return self._cut(ranks, stages_per_rank, sizes, recompute).table

    def memory(self, program: Program, sizes: Sequence[int] | None = None) -> list[int]:
        """By rank, the most bytes of activations, without gradients and what it has all the time."""
        costs = self._cut(program.ranks, program.stages // program.ranks, sizes, program.recompute).costs
        whole, none = with_whole_backwards(program), dict.fromkeys(costs, 0)
        return [peak_of(whole, rank, costs, none).bytes for rank in range(program.ranks)]

    def slices(self, ranks: int) -> dict[str, Any]:
        """
        One for each layer, in seconds; if the device's memory is known, in bytes, too, and with a limit: what the
        device has left, or what is enough. What may be recomputed is among them, unless the recipe says that itself.

        They are of a plan with a stage for each layer; what its stages cost together beyond those of a plan with a
        stage for each rank is what every stage costs besides.
        """
        one = self.plan(ranks, 1)
        count = one.layers
        by_layer = PlacedSchedule(tuple(layer * ranks // count for layer in range(count)), (1,) * count)
        each = self.plan(ranks, 1, by_layer)
        more = each.table.lengths.sum(0) - one.table.lengths.sum(0)
        per_stage = np.clip(more / max(1, count - ranks), 0, 0.9 * each.table.lengths.min(0))
        lengths = each.table.lengths - per_stage
        found = slices_of(attrs.evolve(one.table, lengths=lengths))
        found["per_stage"] = _rounded(per_stage)
        if self.device.memory:
            held, plans = _held(each, "F"), [one]
            nodes = Nodes.of(self.recipe)
            if nodes.settings(nodes.stages)["recompute"] == "none":
                recompute = {}
                for policy in POLICIES:
                    again = self.plan(ranks, 1, attrs.evolve(by_layer, recompute=(policy,) * count))
                    recompute[policy] = {
                        "again": _parts((again.table.lengths - each.table.lengths)[:, 1:3].max(1), lengths[:, 0]),
                        "kept": _parts(_held(again, "F"), held),
                    }
                    plans.append(self._cut(ranks, 1, even(count, ranks), (policy,) * ranks))
                found["recompute"] = recompute
            room = self.device.memory - max(_besides_activations(each, rank) for each in plans for rank in each.memory)
            found["activations"], found["pending"] = held.tolist(), _held(each, "I").tolist()
            found["memory"] = max(1.0, min(float(room), float(ENOUGH * held.sum())))
        return found


def _held(by_layer: Plan, op: str) -> NDArray[np.float64]:
    """Bytes that each stage holds after a pass of a microbatch, 1 at least."""
    costs = by_layer.costs
    return np.array([max(1.0, costs[stage].passes[op].held_bytes) for stage in range(len(costs))])


def _parts(some: NDArray[np.float64], whole: NDArray[np.float64]) -> list[float]:
    return [round(max(0.0, float(part)), 4) for part in some / whole]


def _besides_activations(planned: Plan, rank: RankMemory) -> int:
    """Bytes of a rank besides activations: what it has all the time, gradients, and what an action needs at once."""
    rises = (_beyond(planned.costs[stage].passes) for stage in rank.stages)
    return sum(rank.kept.values()) + rank.whole_gradients + sum(rank.buffers.values()) + max(rises)


def _beyond(passes: Passes) -> int:
    """The most bytes of a pass beyond those that live before it, and those that live behind it."""
    forward, left = passes["F"].held_bytes, passes["I"].held_bytes
    growth = {"F": forward, "I": max(0, left - forward)}
    return max(part.rise - growth.get(op, 0) for op, part in passes.items())


def slices_of(table: CostTable) -> dict[str, Any]:
    """The settings of `pipeline.schedules.auto` for these costs, its slices being their stages."""
    # What takes no time, such as gradients of weights that are frozen, could be anywhere in a schedule.
    lengths = np.maximum(table.lengths, LEAST)
    return {"comm": round(table.comm, 9), "slices": [_rounded(each) for each in lengths]}


def _rounded(costs: NDArray[np.float64]) -> list[float]:
    return [round(float(cost), 9) for cost in costs]
