"""The batches of a run, step after step, in an order that the seed alone decides."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import attrs

from drawloom.components.data.order import ShuffledOrder
from drawloom.components.data.rank_consistency import check_agreement
from drawloom.components.data.workers import Workers
from drawloom.components.ports.data import Batch, PackedDataset
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Batching, RunInfo
from drawloom.graph import UserError, above, at_least, component, setting


@component
class Loader:
    """
    Training rows in an endless order: epoch after epoch, each shuffled by (seed, epoch).

    A step may cross the end of an epoch. All state is the number of steps taken, so that a run goes on with any number
    of workers and replicas.
    """

    rows: PackedDataset
    batching: Batching
    job: RunInfo
    mesh: Mesh
    workers: int = setting(
        default=0,
        impact="safe",
        check=at_least(0),
        doc="processes that make batches ahead of time; 0: none ahead",
    )
    prefetch: int = setting(
        default=2, impact="safe", check=at_least(1), doc="microbatches that each worker makes ahead of time"
    )
    timeout: float = setting(
        default=120.0, impact="safe", check=above(0), doc="seconds after which a worker that gives nothing is an error"
    )
    shuffle: bool = setting(default=True, doc="whether each epoch is shuffled; if not, rows come as they were packed")
    _step: int = attrs.field(init=False, default=0)
    _workers: Workers | None = attrs.field(init=False, default=None)
    _stream: Iterator[Batch] | None = attrs.field(init=False, default=None)
    _agreed: bool = attrs.field(init=False, default=False)

    def open(self) -> None:
        """Start the workers. No rows is a UserError."""
        if self.rows.count("train") == 0:
            raise UserError("rows: the corpus has no document to learn from; give it more text or hold less of it out")
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
        This replica's microbatches of the next step.

        At the first call every rank must take part, and a difference between ranks of one replica is a UserError. So
        is a worker that died or hangs.
        """
        if self._stream is None:
            self._stream = self._batches(self._step + 1)
        batches = [next(self._stream) for _ in range(self.batching.microbatches)]
        if not self._agreed:
            check_agreement(self.mesh.world, self.batching.dp_rank, self.rows.count("train"), batches[0])
            self._agreed = True
        self._step += 1
        return batches

    def state_dict(self) -> dict[str, Any]:
        """`step`: how many steps were taken."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind a step."""
        step = state["step"]
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"step: {step!r} is not a number of steps")
        self._step, self._stream = step, None

    def _batches(self, step: int) -> Iterator[Batch]:
        """The microbatches of a step and of all that follow."""
        wanted = self._wanted(step)
        if self._workers is None:
            return (self.rows.batch("train", indices) for indices in wanted)
        return self._workers.batches(wanted, self.workers * self.prefetch, self.timeout)

    def _wanted(self, step: int) -> Iterator[list[int]]:
        """The rows of these microbatches."""
        order = ShuffledOrder(self.job.seed, self.rows.count("train"), self.shuffle)
        return (order.rows(places) for number in count(step) for places in self.batching.positions(number))
