"""The data loader."""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from math import ceil
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from drawloom.components.data.batch_checks import compute_row_digests
from drawloom.components.data.loader import Loader
from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.order.sequential import Sequential
from drawloom.components.data.order.shuffled import Shuffled
from drawloom.components.ports.data import RowOrder
from drawloom.components.ports.run import Epochs, Step, count_steps_of_epochs, is_due
from drawloom.components.run.batch import GlobalBatch
from drawloom.graph import UserError

RowsOf = Callable[..., Any]
MeshOf = Callable[..., Any]

ROWS, STEP, MICRO = 7, 4, 2
"""Steps 2, 4, 6 and 7 of seven cross the end of an epoch."""


@contextmanager
def loading(rows: Any, mesh: Any, job: Any, global_size: int = STEP, **settings: Any) -> Iterator[Loader]:
    batching = GlobalBatch(mesh=mesh, global_size=global_size, micro_size=min(MICRO, global_size))
    order = settings.pop("order", None) or Shuffled(job=job)
    loader = Loader(rows=rows, order=order, batching=batching, mesh=mesh, **settings)
    loader.open()
    try:
        yield loader
    finally:
        loader.close()


def steps(loader: Loader, names: Any, number: int) -> list[list[list[int]]]:
    return [names(loader.next_step()) for _ in range(number)]


def reference_steps(seed: int, first: int, last: int) -> list[list[list[int]]]:
    """Return one rank's steps, from the epochs' concatenated permutations."""
    epochs = range(last * STEP // ROWS + 1)
    endless = list(chain(*(Permutation(seed, "rows", epoch, ROWS).permute_all().tolist() for epoch in epochs)))
    taken = [endless[step * STEP : (step + 1) * STEP] for step in range(first, last)]
    return [[step[start : start + MICRO] for start in range(0, STEP, MICRO)] for step in taken]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_resumed_loader_continues_the_order(
    rows_of: RowsOf, one_rank: Any, job: Any, names: Any, workers: int
) -> None:
    """A loader with other workers, loaded from any step's state, continues the order, also across epochs."""
    rows = rows_of(train=ROWS)
    with loading(rows, one_rank, job, workers=workers) as loader:
        assert steps(loader, names, 3) == reference_steps(job.seed, 0, 3)
        state = loader.state_dict()
        assert steps(loader, names, 4) == reference_steps(job.seed, 3, 7)
    for others in (0, 1, 2):
        with loading(rows, one_rank, job, workers=others) as loader:
            loader.load_state_dict(state)
            assert steps(loader, names, 4) == reference_steps(job.seed, 3, 7)


@pytest.mark.parametrize("workers", [0, 2])
def test_state_can_be_loaded_into_a_running_loader(
    rows_of: RowsOf, one_rank: Any, job: Any, names: Any, workers: int
) -> None:
    """Batches made in advance for other steps are discarded."""
    with loading(rows_of(train=ROWS), one_rank, job, workers=workers) as loader:
        steps(loader, names, 3)
        loader.load_state_dict({"step": 1, "position": STEP})
        assert steps(loader, names, 3) == reference_steps(job.seed, 1, 4)


def test_state_is_the_number_of_steps(rows_of: RowsOf, one_rank: Any, job: Any, names: Any) -> None:
    """The state counts steps and rows taken without prefetched ones; other states are refused."""
    with loading(rows_of(train=ROWS), one_rank, job, workers=1, prefetch=3) as loader:
        first_rows = loader.state_dict()["first_rows"]
        assert loader.state_dict() == {"step": 0, "position": 0, "first_rows": first_rows}
        steps(loader, names, 2)
        assert loader.state_dict() == {"step": 2, "position": 2 * STEP, "first_rows": first_rows}
        wrong: list[tuple[Any, Any]] = [(-1, 0), ("2", 0), (2, -1), (2, 8.0)]
        refused: list[tuple[Any, Any]] = [
            ({"step": step, "position": position}, ValueError) for step, position in wrong
        ]
        for state, error in (({}, KeyError), *refused):
            with pytest.raises(error):
                loader.load_state_dict(state)
        assert steps(loader, names, 1) == reference_steps(job.seed, 2, 3)


def test_the_rows_of_a_step_do_not_depend_on_the_ranks(rows_of: RowsOf, mesh_of: MeshOf, job: Any, names: Any) -> None:
    """With any number of data-parallel ranks before and after a resume, a step's rows and their order are the same."""
    rows = rows_of(train=ROWS)
    state = {"step": 0, "position": 0}
    for replicas in (2, 1, 4, 2):
        micro_size = min(MICRO, STEP // replicas)
        taken: list[list[int]] = [[], []]
        for replica in range(replicas):
            mesh = mesh_of({"data_replicate": replicas}, {"data_replicate": replica})
            batching = GlobalBatch(mesh=mesh, global_size=STEP, micro_size=micro_size)
            loader = Loader(rows=rows, order=Shuffled(job=job), batching=batching, mesh=mesh)
            loader.open()
            loader.load_state_dict(state)
            for step in range(2):
                taken[step] += chain(*names(loader.next_step()))
        first = state["step"]
        assert taken == [list(chain(*step)) for step in reference_steps(job.seed, first, first + 2)]
        state = loader.state_dict()


@pytest.mark.parametrize(
    ("order", "workers", "dimensions"),
    [
        ("shuffled", 0, ("pipeline", "context", "tensor", "expert")),
        ("sequential", 0, ("pipeline", "context", "tensor", "expert")),
        ("shuffled", 2, ("pipeline",)),
    ],
)
def test_ranks_of_a_replica_have_the_same_batches(
    rows_of: RowsOf, mesh_of: MeshOf, job: Any, order: str, workers: int, dimensions: tuple[str, ...]
) -> None:
    """Pipeline, context, tensor and expert ranks agree in two epochs, and after a resume in the second."""
    rows = rows_of(train=ROWS)
    orders: dict[str, RowOrder] = {"shuffled": Shuffled(job=job), "sequential": Sequential()}
    digests_by_rank = []
    for indices in ({}, *({dimension: 1} for dimension in dimensions)):
        mesh = mesh_of({"data_shard": 2, **dict.fromkeys(dimensions, 2)}, {"data_shard": 1, **indices})
        digests, state = [], {"step": 0, "position": 0}
        for _ in range(2):
            with loading(rows, mesh, job, order=orders[order], workers=workers) as loader:
                loader.load_state_dict(state)
                digests += [compute_row_digests(batch) for _ in range(2) for batch in loader.next_step()]
                state = loader.state_dict()
        digests_by_rank.append(digests)
    assert all(digests == digests_by_rank[0] for digests in digests_by_rank) and len(digests_by_rank[0]) == 4


def test_steps_of_another_size_continue_the_order(rows_of: RowsOf, one_rank: Any, job: Any, names: Any) -> None:
    """After a resume with a greater step, and another with a smaller one, no row is left out and none comes again."""
    rows, taken, state = rows_of(train=40), list[list[int]](), {"step": 0, "position": 0}
    for size in (4, 6, 2, 2):
        with loading(rows, one_rank, job, global_size=size) as loader:
            loader.load_state_dict(state)
            taken += [list(chain(*step)) for step in steps(loader, names, 2)]
            state = loader.state_dict()
            assert [loader.list_rows_on_all_ranks(step) for step in (state["step"] - 1, state["step"])] == taken[-2:]
    assert [*chain(*taken)] == Permutation(job.seed, "rows", 0, 40).permute_all().tolist()[:28]
    assert state == {"step": 8, "position": 28, "since": 4, "offset": 12, "first_rows": state["first_rows"]}


def test_steps_in_another_order_are_counted_as_such(rows_of: RowsOf, one_rank: Any, job: Any, names: Any) -> None:
    """The last step before a change of seed is known, also after later resumes; without a change there is none."""
    rows, state = rows_of(train=40), {"step": 0, "position": 0}
    for seed, changed in ((1, 0), (1, 0), (2, 4), (2, 4)):
        with loading(rows, one_rank, attrs.evolve(job, seed=seed), global_size=4) as loader:
            loader.load_state_dict(state)
            steps(loader, names, 2)
            state = loader.state_dict()
            assert loader.last_changed_step == changed


def test_epochs_and_seeds_are_shuffled_differently(rows_of: RowsOf, one_rank: Any, job: Any, names: Any) -> None:
    """An epoch has all rows in an order that depends on the seed; unshuffled rows keep the packing's order."""
    rows = rows_of(train=20)
    orders = []
    for seed in (1, 1, 2):
        with loading(rows, one_rank, attrs.evolve(job, seed=seed), global_size=20) as loader:
            orders += [list(chain(*step)) for step in steps(loader, names, 2)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert orders[:2] == orders[2:4]
    assert len({tuple(order) for order in orders}) == 4
    with loading(rows, one_rank, job, global_size=20, order=Sequential()) as loader:
        assert [list(chain(*step)) for step in steps(loader, names, 2)] == [list(range(20))] * 2


def test_a_step_larger_than_the_corpus_wraps_around(rows_of: RowsOf, one_rank: Any, job: Any, names: Any) -> None:
    """Three rows fill a step of eight: two epochs and the beginning of a third."""
    with loading(rows_of(train=3), one_rank, job, global_size=8) as loader:
        step = list(chain(*names(loader.next_step())))
    assert sorted(step[:3]) == sorted(step[3:6]) == [0, 1, 2]
    assert len(step) == 8


@pytest.mark.parametrize("size", [1, 3, 4, 16])
@pytest.mark.parametrize("length", [0.1, 0.25, 1, 1.5])
def test_actions_in_epochs_follow_the_rows_exactly(
    rows_of: RowsOf, one_rank: Any, job: Any, size: int, length: float
) -> None:
    """An action is due in the steps that contain the last row of a multiple of its length, and in no other."""
    with loading(rows_of(ROWS), one_rank, job, size) as loader:
        ends = [(step, loader.count_epochs_after(step)) for step in range(61)]
        due = [
            step
            for (step, after), (_, before) in zip(ends[1:], ends, strict=False)
            if is_due(Epochs(epochs=length), Step(step, 99, epochs=(before, after)))
        ]
        rows = [ceil(number * round(length * 100) * ROWS / 100) for number in range(1, 1500)]
        assert due == sorted({-(-row // size) for row in rows if -(-row // size) <= 60})
        assert count_steps_of_epochs(length, loader) == -(-rows[0] // size)


def test_an_empty_training_split_is_an_error(rows_of: RowsOf, one_rank: Any, job: Any) -> None:
    """It is refused when the loader opens, before a worker starts."""
    with pytest.raises(UserError, match="the training split is empty"), loading(rows_of(validation=3), one_rank, job):
        pass
    documents = SimpleNamespace(lengths=[9, 9])
    tokens = SimpleNamespace(documents=lambda _split: documents)
    too_long: Any = SimpleNamespace(tokens=tokens, count_rows=lambda _split: 0, length=8)
    none: Any = None
    with pytest.raises(UserError, match="no training document fits into a row of 8 tokens; raise `length`"):
        Loader(rows=too_long, order=none, batching=none, mesh=none).open()


def generators() -> list[Any]:
    """Return the states of Python's, numpy's and torch's generators in this process."""
    return [random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_no_random_numbers_are_drawn(rows_of: RowsOf, one_rank: Any, job: Any, names: Any, workers: int) -> None:
    """Python's, numpy's and torch's generators are unchanged, and their states do not matter."""
    rows = rows_of(train=ROWS)
    seen = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        before = generators()
        with loading(rows, one_rank, job, workers=workers) as loader:
            seen.append(steps(loader, names, 3))
        assert generators() == before
    assert seen[0] == seen[1]


def test_a_killed_worker_raises_an_error(rows_of: RowsOf, one_rank: Any, job: Any, names: Any) -> None:
    """The step that needs its batch raises, and closing ends the other workers."""
    with loading(rows_of(train=ROWS), one_rank, job, workers=2) as loader:
        steps(loader, names, 1)
        victim = multiprocessing.active_children()[0].pid
        os.kill(victim or 0, signal.SIGKILL)
        with pytest.raises(UserError, match="killed by SIGKILL"):
            steps(loader, names, 9)
    assert multiprocessing.active_children() == []


@attrs.frozen
class Disagreeing:
    """A world in which another rank with the same data-parallel index sees other rows."""

    def gather_json(self, value: Any) -> list[Any]:
        return [value, [*value[:-1], "other"]]


def test_ranks_are_compared_at_the_first_step(rows_of: RowsOf, mesh_of: MeshOf, job: Any) -> None:
    """A run's first step, also after a resume, finds ranks with other rows."""
    for state in ({"step": 0, "position": 0}, {"step": 5, "position": 5 * STEP}):
        with loading(rows_of(train=ROWS), mesh_of(world=Disagreeing()), job) as loader:
            loader.load_state_dict(state)
            with pytest.raises(UserError, match="ranks 0 and 1 have the same data-parallel index 0"):
                loader.next_step()
