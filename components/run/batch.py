"""Batch sizes: the global and micro batch size, gradient accumulation, and every data-parallel rank's rows."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal

import attrs

from drawloom import NodeView, Problem, UserError, at_least, between, component, setting
from drawloom.graph.problems import KeyPath
from drawloom.ports import Mesh, PackedDataset, PerDimension, choose_micro_size

MAX_ROWS = 1_000_000
"""Largest batch size: many times that of the largest runs, because a step lists the positions of all its rows."""

ROWS = between(1, MAX_ROWS + 1)


@attrs.frozen(kw_only=True)
class RampStage:
    """Batch size for a run's first steps, up to a step or a token count."""

    size: int = setting("rows in a step, over all data-parallel ranks", check=ROWS)
    until_step: int | None = setting("last step with this size", default=None, check=at_least(1))
    until_tokens: int | None = setting(
        "token count in full rows; the step that reaches it is the last one with this size",
        default=None,
        check=at_least(1),
    )


@component
class GlobalBatch:
    """
    A fixed batch size, divided evenly among data-parallel ranks and then into equal microbatches.

    A step takes the next `global_size` positions in the endless order and splits them over the data-parallel ranks, so
    its rows do not depend on the rank count. A rank with several microbatches accumulates their gradients (gradient
    accumulation). With `ramp`, a run's first steps have other sizes.
    """

    mesh: Mesh
    rows: PackedDataset | None = None
    global_size: int = setting("rows in a step, over all data-parallel ranks", check=ROWS)
    micro_limit: int = setting(
        "rows in a microbatch at most: it has the largest number that divides a rank's rows in a step",
        alias="micro_size",
        check=ROWS,
        impact="safe",
    )
    ramp: list[RampStage] = setting(
        'batch sizes for the first steps, in order (batch size warm-up); `until_tokens` needs rows = "@packing"',
        factory=list,
    )
    deal: Literal["in_blocks", "in_turn"] = setting(
        "whether a rank gets a step's consecutive rows, or every nth row", default="in_blocks", impact="safe"
    )

    def open(self) -> None:
        """Check the sizes against the mesh. Raises UserError if a step's rows can't be divided evenly."""
        for path, text, hint in _find_undivided_sizes(self.global_size, self.ramp, self.dp_size):
            raise UserError(f"{path[0]}: {text}; {hint}", exit_code=2)

    @cached_property
    def micro_size(self) -> int:
        sizes = [self.global_size, *(stage.size for stage in self.ramp)]
        return choose_micro_size(sizes, self.micro_limit, self.dp_size)

    @cached_property
    def dp_size(self) -> int:
        # pipeline, context and tensor ranks work on the same rows
        return self.mesh.sizes.data_replicate * self.mesh.sizes.data_shard

    @cached_property
    def dp_rank(self) -> int:
        return self.mesh.indices.data_replicate * self.mesh.sizes.data_shard + self.mesh.indices.data_shard

    def supports_replica_count(self, count: int) -> bool:
        return not any(_find_undivided_sizes(self.global_size, self.ramp, count))

    def first_row_position(self, step: int) -> int:
        done = position = 0  # steps and rows of earlier stages
        for stage in self.ramp:
            last = min(self._find_last_step_of_ramp_stage(stage, done, position), step - 1)
            done, position = last, position + (last - done) * stage.size
        return position + (step - 1 - done) * self.global_size

    def microbatch_row_positions(self, step: int) -> list[list[int]]:
        first, end = self.first_row_position(step), self.first_row_position(step + 1)
        share = (end - first) // self.dp_size
        if self.deal == "in_turn":
            local = range(first + self.dp_rank, end, self.dp_size)
        else:
            local = range(first + self.dp_rank * share, first + (self.dp_rank + 1) * share)
        return [list(local[start : start + self.micro_size]) for start in range(0, share, self.micro_size)]

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
            sizes = PerDimension.from_settings(mesh.settings)
            faults = _find_undivided_sizes(
                node.settings["global_size"], node.settings["ramp"], sizes.data_replicate * sizes.data_shard
            )
            yield from (node.problem(key, text, hint) for key, text, hint in faults)
        for number, stage in enumerate(node.settings["ramp"]):
            if (stage.until_step is None) == (stage.until_tokens is None):
                text = f"ramp[{number}] must set exactly one of until_step and until_tokens"
                yield node.problem(("ramp", number), text, "write until_step = N or until_tokens = N")
            elif stage.until_tokens is not None and not node.neighbour("rows"):
                text = f"ramp[{number}]: until_tokens needs the length of rows"
                yield node.problem(("ramp", number), text, 'write rows = "@packing"')


def _find_undivided_sizes(
    global_size: int, ramp: Sequence[RampStage], replicas: int
) -> Iterator[tuple[KeyPath, str, str]]:
    """Yield the key of every size that is not divisible among the replicas, the reason, and the remedy."""
    paths: dict[KeyPath, int] = {("global_size",): global_size}
    paths |= {("ramp", number, "size"): stage.size for number, stage in enumerate(ramp)}
    for path, size in paths.items():
        if size % replicas:
            nearest = [number for number in (size // replicas * replicas, -(-size // replicas) * replicas) if number]
            where = "" if len(path) == 1 else f"ramp[{path[1]}]: "
            text = f"{where}{size} rows can't be divided evenly among {replicas} replicas"
            yield path, text, f"write {path[-1]} = {' or '.join(map(str, nearest))}"
