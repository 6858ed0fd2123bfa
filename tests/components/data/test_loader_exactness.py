"""Runs resumed with random ranks, workers and prefetching, and killed at random moments."""

from contextlib import ExitStack
from functools import cache
from itertools import chain
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from drawloom.components.data.loader import Loader
from drawloom.components.data.mixture import Mixture
from drawloom.components.data.order.chunks import Chunks
from drawloom.components.data.order.sequential import Sequential
from drawloom.components.data.order.shuffled import Shuffled
from drawloom.components.data.order.sorted_buffers import SortedBuffers
from drawloom.components.data.order.stream import list_row_sources
from drawloom.components.data.packing.best_fit import BestFit
from drawloom.components.data.packing.packed_rows import PackedRows
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.ports.data import RowOrder, require_token_batch
from drawloom.components.ports.run import count_steps_of_epochs
from drawloom.components.run.batch import GlobalBatch

GLOBAL = 8

_fixtures: dict[str, Any] = {}


@attrs.frozen
class Documents:
    """Documents whose first token names them."""

    first: int = 0
    count: int = 61
    vocab_size: ClassVar[int] = 60_000
    eos_id: ClassVar[int] = 0

    def documents(self, split: str) -> TokenArrays:
        numbers = range(self.first, self.first + self.count)
        return TokenArrays.concatenate([np.full(2 + number % 9, number + 1) for number in numbers], np.uint16)


class Runs(RuleBasedStateMachine):
    """A state machine for comparing interrupted runs with an uninterrupted run on one rank."""

    workers = st.just(0)

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.rows: PackedRows = BestFit(tokens=Documents(), job=_fixtures["job"], length=16)
        self.rows.open()
        self.order: RowOrder = Shuffled(job=_fixtures["job"])

    @initialize(order=st.sampled_from(["shuffled", "sequential", "chunks", "sorted"]))
    def start(self, order: str) -> None:
        job = _fixtures["job"]
        orders: dict[str, RowOrder] = {
            "shuffled": Shuffled(job=job),
            "sequential": Sequential(),
            "chunks": Chunks(chunks=3),
            "sorted": SortedBuffers(lengths=self.rows, job=job, buffer=12, pack=3),
        }
        self.order = orders[order]
        self.step, self.checkpoint = 0, {"step": 0, "position": 0}
        [reference] = self._loaders(1, 1, GLOBAL, 0, 1)
        self.reference = [self._names([reference]) for _ in range(60)]
        self.loaders = self._loaders(1, 1, 4, 0, 1)

    @rule(steps=st.integers(1, 4), save=st.booleans())
    def take_steps(self, steps: int, save: bool) -> None:
        """Take steps, and compare their rows with the reference."""
        for _ in range(min(steps, len(self.reference) - self.step)):
            assert self._names(self.loaders) == self.reference[self.step], f"step {self.step + 1} differs"
            self.step += 1
        if save:
            self.checkpoint = self.loaders[0].state_dict()

    @rule(
        data=st.data(), replicas=st.sampled_from([1, 2, 4]), shards=st.sampled_from([1, 2]), prefetch=st.integers(1, 3)
    )
    def kill_and_resume(self, data: st.DataObject, replicas: int, shards: int, prefetch: int) -> None:
        """Continue from the last checkpoint with other processes."""
        share = GLOBAL // (replicas * shards)
        micro = data.draw(st.sampled_from([size for size in (1, 2, 4, 8) if share % size == 0]))
        self.stack.close()
        self.loaders = self._loaders(replicas, shards, micro, data.draw(self.workers), prefetch)
        for loader in self.loaders:
            loader.load_state_dict(self.checkpoint)
        self.step = self.checkpoint["step"]

    def teardown(self) -> None:
        self.stack.close()

    def _loaders(self, replicas: int, shards: int, micro: int, workers: int, prefetch: int) -> list[Loader]:
        """Return the loaders of all data-parallel ranks."""
        loaders = []
        for rank in range(replicas * shards):
            sizes = {"data_replicate": replicas, "data_shard": shards}
            mesh = _fixtures["mesh_of"](sizes, {"data_replicate": rank // shards, "data_shard": rank % shards})
            batching = GlobalBatch(mesh=mesh, global_size=GLOBAL, micro_size=micro)
            loader = Loader(
                rows=self.rows, order=self.order, batching=batching, mesh=mesh, workers=workers, prefetch=prefetch
            )
            loader.open()
            self.stack.callback(loader.close)
            loaders.append(loader)
        return loaders

    def _names(self, loaders: list[Loader]) -> list[list[int]]:
        """Return the tokens in a step's rows, in order."""
        batches = chain.from_iterable(loader.next_step() for loader in loaders)
        return [row for batch in batches for row in require_token_batch(batch, "test").tokens.tolist()]


WEIGHTS = st.fixed_dictionaries({name: st.integers(0, 4) for name in "abc"}).filter(lambda held: any(held.values()))


class Mixtures(Runs):
    """
    The same machine with a mixture: some resumes change its weights or add a source. A source's rows come in the order
    they have alone, under any weights: none is lost, and none comes twice in an epoch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: dict[str, Any] = {
            name: Documents(first, count) for name, first, count in (("a", 0, 40), ("b", 100, 9))
        }
        self._weigh({"a": 3, "b": 1})

    def _weigh(self, weights: dict[str, int]) -> None:
        shares = {name: float(weights[name]) for name in self.sources}
        self.rows = BestFit(tokens=Mixture(sources=self.sources, weights=shares), job=_fixtures["job"], length=16)
        self.rows.open()

    @initialize()
    def start(self) -> None:
        super().start("shuffled")

    def _expect(self, step: int) -> None:
        """Compute the steps from here on, as one rank takes them without interruption."""
        [reference] = self._loaders(1, 1, GLOBAL, 0, 1)
        if step:
            reference.load_state_dict(self.checkpoint)
        self.reference = [*self.reference[:step], *(self._names([reference]) for _ in range(60 - step))]

    @rule(weights=WEIGHTS, add=st.booleans())
    def resume_with_other_weights(self, weights: dict[str, int], add: bool) -> None:
        """Continue from the last checkpoint with another mixture."""
        if add:
            self.sources["c"] = Documents(200, 20)
        if not any(weights[name] for name in self.sources):
            return
        self.stack.close()
        self._weigh(weights)
        self.step = self.checkpoint["step"]
        self._expect(self.step)
        self.loaders = self._loaders(1, 2, 2, 0, 1)
        for loader in self.loaders:
            loader.load_state_dict(self.checkpoint)
        # later kills resume with these weights, too
        self.checkpoint = self.loaders[0].state_dict()

    @invariant()
    def each_source_continues(self) -> None:
        """Compare all sources' rows so far with the beginning of their orders alone."""
        if not hasattr(self, "step"):
            return
        names = [row[0] for step in self.reference[: self.step] for row in step]
        for name, source in self.sources.items():
            own = [first for first in names if source.first < first <= source.first + source.count]
            alone = _alone(source, name)
            assert own == alone[: len(own)], f"the rows of {name} do not go on where they were"


@cache
def _alone(source: "Documents", name: str) -> list[int]:
    """Return the first tokens of a source's rows in order, from a mixture without other sources."""
    rows = BestFit(tokens=Mixture(sources={name: source}), job=_fixtures["job"], length=16)
    rows.open()
    batching = GlobalBatch(mesh=_fixtures["mesh_of"](), global_size=480, micro_size=480)
    loader = Loader(rows=rows, order=Shuffled(job=_fixtures["job"]), batching=batching, mesh=batching.mesh)
    loader.open()
    [batch] = loader.next_step()
    return [int(first) for first in require_token_batch(batch, "test").tokens[:, 0]]


def test_an_epoch_of_a_mixture_has_every_row_once(mesh_of: Any, job: Any) -> None:
    """A mixture by size passes over its sources at once; a source without weight does not count."""
    mesh = mesh_of()
    sources: dict[str, Any] = {"long": Documents(), "short": Documents(first=100, count=17)}
    rows = [
        BestFit(tokens=Mixture(sources=sources, weights=weights), job=job, length=16)
        for weights in ({}, {"long": 1.0, "short": 0.0})
    ]
    loaders = [
        Loader(
            rows=data, order=Shuffled(job=job), batching=GlobalBatch(mesh=mesh, global_size=1, micro_size=1), mesh=mesh
        )
        for data in rows
    ]
    for data, loader in zip(rows, loaders, strict=True):
        data.open()
        loader.open()
    steps = count_steps_of_epochs(2, loaders[0])
    seen = [row for step in range(1, steps + 1) for row in loaders[0].list_rows_on_all_ranks(step)]
    assert sorted(seen) == sorted([*range(rows[0].count_rows("train"))] * 2)
    [long, _] = list_row_sources(rows[1])
    assert loaders[1].rows_per_epoch == long.rows < rows[1].count_rows("train")


class RunsWithWorkers(Runs):
    """The same with worker processes."""

    workers = st.integers(0, 2)


@pytest.fixture(autouse=True)
def fixtures(job: Any, mesh_of: Any) -> None:
    """Make the fixtures for the machines."""
    _fixtures.update(job=job, mesh_of=mesh_of)


def test_a_run_sees_the_same_rows_after_any_events() -> None:
    """After any number of kills and resumes, with any ranks, steps have the reference's rows."""
    run_state_machine_as_test(Runs, settings=settings(max_examples=15, stateful_step_count=15, deadline=None))


def test_a_mixture_sees_the_same_rows_after_any_events() -> None:
    """Sources of mixtures continue with their next rows under other weights."""
    run_state_machine_as_test(Mixtures, settings=settings(max_examples=10, stateful_step_count=12, deadline=None))


@pytest.mark.soak
def test_a_run_with_workers_sees_the_same_rows_after_any_events() -> None:
    """Worker processes, started anew at each resume, change no row."""
    run_state_machine_as_test(
        RunsWithWorkers, settings=settings(max_examples=20, stateful_step_count=12, deadline=None)
    )
