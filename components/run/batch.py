"""Batch sizes: the global and micro batch size, gradient accumulation, and every data-parallel rank's rows."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal

import attrs

from drawloom.components.ports.data import PackedDataset
from drawloom.components.ports.distributed import Mesh, PerDimension
from drawloom.graph import UserError, at_least, between, component, setting
from drawloom.graph.problems import KeyPath, Problem
from drawloom.graph.wiring.node import NodeView

MAX_ROWS = 1_000_000
"""Largest batch size: many times that of the largest runs, because a step lists the positions of all its rows."""

ROWS = between(1, MAX_ROWS + 1)


@attrs.frozen(kw_only=True)
class RampStage:
    """Batch size for a run's first steps, up to a step or a token count."""

    size: int = setting(check=ROWS, doc="rows in a step, over all data-parallel ranks")
    until_step: int | None = setting(default=None, check=at_least(1), doc="last step with this size")
    until_tokens: int | None = setting(
        default=None,
        check=at_least(1),
        doc="token count in full rows; the step that reaches it is the last one with this size",
    )


@component
class GlobalBatch:
    """
    A fixed batch size, divided evenly among data-parallel ranks and then into microbatches.

    A step takes the next `global_size` positions in the endless order and splits them over the data-parallel ranks, so
    its rows do not depend on the rank count. A rank with several microbatches accumulates their gradients (gradient
    accumulation). With `ramp`, a run's first steps have other sizes.
    """

    mesh: Mesh
    rows: PackedDataset | None = None
    global_size: int = setting(check=ROWS, doc="rows in a step, over all data-parallel ranks")
    micro_size: int = setting(check=ROWS, impact="safe", doc="rows in a microbatch")
    ramp: list[RampStage] = setting(
        factory=list,
        doc='batch sizes for the first steps, in order (batch size warm-up); `until_tokens` needs rows = "@packing"',
    )
    deal: Literal["in_blocks", "in_turn"] = setting(
        default="in_blocks", impact="safe", doc="whether a rank gets a step's consecutive rows, or every nth row"
    )

    def open(self) -> None:
        """Check the sizes against the mesh. Raises UserError if a step's rows can't be divided evenly."""
        for path, text, hint in _explain_uneven_sizes_and_remedies(
            self.global_size, self.ramp, self.micro_size, self.dp_size
        ):
            raise UserError(f"{path[0]}: {text}; {hint}", exit_code=2)

    @cached_property
    def dp_size(self) -> int:
        # pipeline, context and tensor ranks work on the same rows
        return self.mesh.sizes.data_replicate * self.mesh.sizes.data_shard

    @cached_property
    def dp_rank(self) -> int:
        return self.mesh.indices.data_replicate * self.mesh.sizes.data_shard + self.mesh.indices.data_shard

    def supports_replica_count(self, count: int) -> bool:
        return not any(_explain_uneven_sizes_and_remedies(self.global_size, self.ramp, self.micro_size, count))

    def first_row_position(self, step: int) -> int:
        return self._compute_first_position_and_size(step)[0]

    def microbatch_row_positions(self, step: int) -> list[list[int]]:
        first, size = self._compute_first_position_and_size(step)
        share = size // self.dp_size
        if self.deal == "in_turn":
            local = range(first + self.dp_rank, first + size, self.dp_size)
        else:
            local = range(first + self.dp_rank * share, first + (self.dp_rank + 1) * share)
        return [list(local[start : start + self.micro_size]) for start in range(0, share, self.micro_size)]

    def _compute_first_position_and_size(self, step: int) -> tuple[int, int]:
        """Return a step's first position and size."""
        done = position = 0
        for stage in self.ramp:
            steps = self._find_last_step_of_ramp_stage(stage, done, position) - done
            if step - 1 < done + steps:
                return position + (step - 1 - done) * stage.size, stage.size
            done, position = done + steps, position + steps * stage.size
        return position + (step - 1 - done) * self.global_size, self.global_size

    def _find_last_step_of_ramp_stage(self, stage: RampStage, done: int, position: int) -> int:
        """Return the last step of a stage beginning after `done` steps."""
        if stage.until_step is not None:
            return max(done, stage.until_step)
        assert stage.until_tokens is not None and self.rows is not None
        rows = -(-stage.until_tokens // self.rows.length)
        return done + max(0, -(-(rows - position) // stage.size))

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report sizes uneven for any process count, and stages without an end."""
        # a dimension of size "auto" counts as 1, which is the smallest size and divides all others
        if mesh := node.neighbour("mesh"):
            sizes, settings = PerDimension.from_settings(mesh.settings), node.settings
            replicas = sizes.data_replicate * sizes.data_shard
            faults = _explain_uneven_sizes_and_remedies(
                settings["global_size"], settings["ramp"], settings["micro_size"], replicas
            )
            yield from (node.problem(key, text, hint) for key, text, hint in faults)
        for number, stage in enumerate(node.settings["ramp"]):
            if (stage.until_step is None) == (stage.until_tokens is None):
                text = f"ramp[{number}] must set exactly one of until_step and until_tokens"
                yield node.problem(("ramp", number), text, "write until_step = N or until_tokens = N")
            elif stage.until_tokens is not None and not node.neighbour("rows"):
                text = f"ramp[{number}]: until_tokens needs the length of rows"
                yield node.problem(("ramp", number), text, 'write rows = "@packing"')


def _explain_uneven_sizes_and_remedies(
    global_size: int, ramp: Sequence[RampStage], micro_size: int, replicas: int
) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield the key of every size not divisible into whole microbatches, the reason, and the remedy."""
    if fault := explain_uneven_step_and_remedy(global_size, micro_size, replicas):
        yield ("global_size",), *fault
    for number, stage in enumerate(ramp):
        if fault := explain_uneven_step_and_remedy(stage.size, micro_size, replicas):
            yield ("ramp", number, "size"), f"ramp[{number}]: {fault[0]}", fault[1].replace("global_size", "size")


def explain_uneven_step_and_remedy(global_size: int, micro_size: int, replicas: int) -> tuple[str, str] | None:
    """Return why a step can't be divided into whole microbatches, and the remedy; None if it can."""
    unit = micro_size * replicas
    if global_size % unit == 0:
        return None
    among = f"{replicas} replica{'s' * (replicas > 1)} with microbatches of {micro_size}"
    return f"{global_size} rows can't be divided evenly among {among}", _suggest_sizes(
        global_size, micro_size, replicas
    )


def _suggest_sizes(global_size: int, micro_size: int, replicas: int) -> str:
    """Return a hint with the nearest sizes divisible into whole microbatches."""
    unit = micro_size * replicas
    below = global_size // unit * unit
    nearest = [below, below + unit] if below else [unit]
    remedy = "write global_size = " + " or ".join(map(str, nearest))
    if global_size % replicas == 0:
        share = global_size // replicas
        fitting = max(size for size in range(1, min(micro_size, share) + 1) if share % size == 0)
        remedy += f", or micro_size = {fitting}"
    return remedy
