"""The data loader: the batches of a run, in an order that depends only on the seed."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import attrs

from drawloom.components.data.order import ShuffledOrder
from drawloom.components.data.rank_consistency import check_consistency
from drawloom.components.data.workers import Workers
from drawloom.components.ports.data import Batch, PackedDataset
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Batching, RunInfo
from drawloom.graph import UserError, above, at_least, component, setting


@component
class Loader:
    """
    Training rows in an endless order of epochs, each shuffled by (seed, epoch).

    A step may cross the end of an epoch. The only state is the number of steps taken, so that a run resumes with any
    number of workers and data-parallel ranks.
    """

    rows: PackedDataset
    batching: Batching
    job: RunInfo
    mesh: Mesh
    workers: int = setting(
        default=0,
        impact="safe",
        check=at_least(0),
        doc="processes that make batches ahead of time; 0: batches are made in this process",
    )
    prefetch: int = setting(
        default=2, impact="safe", check=at_least(1), doc="microbatches that each worker makes ahead of time"
    )
    timeout: float = setting(
        default=120.0, impact="safe", check=above(0), doc="seconds to wait for a worker's batch before it is an error"
    )
    shuffle: bool = setting(default=True, doc="shuffle each epoch; if false, rows come in the order of packing")
    _step: int = attrs.field(init=False, default=0)
    _workers: Workers | None = attrs.field(init=False, default=None)
    _stream: Iterator[Batch] | None = attrs.field(init=False, default=None)
    _checked: bool = attrs.field(init=False, default=False)

    def open(self) -> None:
        """Start the workers. Raises UserError if there are no rows."""
        if self.rows.count("train") == 0:
            raise UserError("rows: the training split is empty; add text, or lower `validation_fraction` in the corpus")
        if self.workers:
            self._workers = Workers(self.rows, "train", self.workers)

    def close(self) -> None:
        """End the workers."""
        self._stream = None
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def next_step(self) -> list[Batch]:
        """
        This data-parallel rank's microbatches of the next step.

        The first call is a collective. Raises UserError if ranks that must see the same rows do not, or if a worker
        dies or hangs.
        """
        if self._stream is None:
            self._stream = self._batches(self._step + 1)
        batches = [next(self._stream) for _ in range(self.batching.microbatches)]
        # once is enough: later steps follow from the same seed, rows and order
        if not self._checked:
            check_consistency(self.mesh.world, self.batching.dp_rank, self.rows.count("train"), batches[0])
            self._checked = True
        self._step += 1
        return batches

    def state_dict(self) -> dict[str, Any]:
        """`step`: the number of steps taken."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume after a step."""
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step: {step!r} is not a number of steps")
        self._step, self._stream = step, None

    def _batches(self, step: int) -> Iterator[Batch]:
        """The microbatches from this step on, without end."""
        wanted = self._row_indices(step)
        if self._workers is None:
            return (self.rows.batch("train", indices) for indices in wanted)
        return self._workers.batches(wanted, self.workers * self.prefetch, self.timeout)

    def _row_indices(self, step: int) -> Iterator[list[int]]:
        """The rows of each microbatch from this step on, without end."""
        order = ShuffledOrder(self.job.seed, self.rows.count("train"), self.shuffle)
        return (order.rows(positions) for number in count(step) for positions in self.batching.positions(number))
