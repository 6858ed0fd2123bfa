"""A machine that resumes a run with other ranks, workers and prefetching at random, and kills it at random."""

from contextlib import ExitStack
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from drawloom.components.data.loader import Loader
from drawloom.components.data.packing.best_fit import BestFit
from drawloom.components.data.packing.packed_rows import PackedRows
from drawloom.components.data.token_arrays import TokenArrays
from drawloom.components.run.batch import GlobalBatch

GLOBAL = 8

_fixtures: dict[str, Any] = {}


class Documents:
    """Documents whose first token names them."""

    vocab_size, eos_id = 60_000, 0

    def documents(self, split: str) -> TokenArrays:
        return TokenArrays.of([np.full(2 + number % 9, number + 1) for number in range(61)], np.uint16)


class Runs(RuleBasedStateMachine):
    """The steps that a run takes, whatever happens to it, are those of a run of one rank without interruption."""

    workers = st.just(0)

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        self.rows: PackedRows = BestFit(tokens=Documents(), job=_fixtures["job"], length=16)
        self.rows.open()
        [reference] = self._loaders(1, 1, GLOBAL, 0, 1)
        self.reference = [self._names([reference]) for _ in range(60)]

    @initialize()
    def start(self) -> None:
        self.step, self.checkpoint = 0, {"step": 0}
        self.loaders = self._loaders(1, 1, 4, 0, 1)

    @rule(steps=st.integers(1, 4), save=st.booleans())
    def take_steps(self, steps: int, save: bool) -> None:
        """Take steps, each of which has to be that of the reference."""
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
        """The loaders of all data-parallel ranks."""
        loaders = []
        for rank in range(replicas * shards):
            sizes = {"data_replicate": replicas, "data_shard": shards}
            mesh = _fixtures["mesh_of"](sizes, {"data_replicate": rank // shards, "data_shard": rank % shards})
            batching = GlobalBatch(mesh=mesh, global_size=GLOBAL, micro_size=micro)
            job = _fixtures["job"]
            loader = Loader(rows=self.rows, batching=batching, job=job, mesh=mesh, workers=workers, prefetch=prefetch)
            loader.open()
            self.stack.callback(loader.close)
            loaders.append(loader)
        return loaders

    def _names(self, loaders: list[Loader]) -> list[list[int]]:
        """The tokens of the rows of a step, in order."""
        batches = chain.from_iterable(loader.next_step() for loader in loaders)
        return [row for batch in batches for row in batch.tokens.tolist()]


class RunsWithWorkers(Runs):
    """The same with worker processes."""

    workers = st.integers(0, 2)


@pytest.fixture(autouse=True)
def fixtures(job: Any, mesh_of: Any) -> None:
    """What the machines are made of."""
    _fixtures.update(job=job, mesh_of=mesh_of)


def test_a_run_sees_the_same_rows_whatever_happens() -> None:
    """After any number of kills and resumes, with any ranks, each step has the rows of the reference."""
    run_state_machine_as_test(Runs, settings=settings(max_examples=15, stateful_step_count=15, deadline=None))


@pytest.mark.soak
def test_a_run_with_workers_sees_the_same_rows_whatever_happens() -> None:
    """The same with worker processes, which are started anew at each resume."""
    run_state_machine_as_test(
        RunsWithWorkers, settings=settings(max_examples=20, stateful_step_count=12, deadline=None)
    )
