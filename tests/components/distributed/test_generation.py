"""The next generation's members, their mesh and their LOCAL_RANKs."""

import os
from collections.abc import Iterable

import attrs
import pytest

from drawloom.components.distributed.generation import Generation, ReplicaShape, RunProcess, assign_local_ranks
from drawloom.components.distributed.mesh_layout import MODEL, Layout
from drawloom.components.distributed.torchrun import Launch

SPARES = [RunProcess("elsewhere", 100), RunProcess("elsewhere", 101)]


def _generation(ranks: int, shape: ReplicaShape, shards: int | None = None) -> Generation:
    """Return a generation of processes on another machine, whose ids are their ranks."""
    return Generation("run", 0, [RunProcess("elsewhere", rank) for rank in range(ranks)], shape, shards)


@pytest.mark.parametrize(
    ("lost", "spares", "counts", "members"),
    [
        ({5}, 0, {1, 2, 3, 4}, [0, 2, 3, 4, 6, 7]),  # replica (1, 5) is incomplete, and rank 1 alone is none
        ({5}, 0, {1, 2, 4}, [0, 2, 4, 6]),  # three replicas can't share the work, and the last one leaves
        ({5}, 1, {1, 2, 3, 4}, [0, 2, 3, 1, 4, 6, 7, 100]),  # rank 1 and a spare are a new replica
        ({5, 6}, 0, {1, 2, 3, 4}, [0, 3, 1, 4, 7, 2]),  # the rest of two replicas is a new one
        (set[int](), 2, {1, 2, 3, 4}, [*range(8)]),  # there is no work for a fifth one
        ({0, 1, 2}, 0, {1, 2}, [3, 4, 7, 5]),
        ({0, 5, 2, 7}, 2, {1, 2, 3, 4}, [4, 6, 100, 1, 3, 101]),  # no replica is complete
        ({0, 1, 2, 3, 4, 5, 6}, 0, {1, 2, 3, 4}, []),  # one rank can't have both stages
        ({5}, 0, set[int](), []),
    ],
)
def test_complete_replicas_continue_and_spares_fill_new_ones(
    lost: set[int], spares: int, counts: set[int], members: list[int]
) -> None:
    """Replicas are columns of two pipeline stages of four ranks."""
    chosen = _generation(8, ReplicaShape(2, 1, 1, [*counts])).choose_next_generation(lost, SPARES[:spares])
    assert [member.pid for member in chosen.members] == members and chosen.shards is None


@pytest.mark.parametrize(
    ("ranks", "shards", "lost", "spares", "members", "left"),
    [
        (4, None, {1}, 0, [0, 2, 3], 3),
        (4, None, {1}, 1, [0, 2, 3, 100], None),  # a spare completes the replica
        (4, None, {1, 2}, 0, [0, 3], 2),
        (4, None, {0, 1, 2}, 0, [3], 1),
        (8, None, {0, 1, 4}, 0, [2, 3, 5, 6], None),  # two incomplete replicas form one
        (8, None, {1}, 0, [4, 5, 6, 7], None),
        (3, 3, {1}, 0, [0, 2], 2),
        (3, 3, set[int](), 1, [0, 1, 2, 100], None),
        (2, 2, set[int](), 0, [0, 1], 2),
    ],
)
def test_without_a_complete_replica_the_run_has_fewer_shards(
    ranks: int, shards: int | None, lost: set[int], spares: int, members: list[int], left: int | None
) -> None:
    """Replicas have four shards in the recipe, and otherwise as many as there are processes that can share the work."""
    shape = ReplicaShape(1, 4, 1, [1, 2, 3, 4, 6, 8])
    chosen = _generation(ranks, shape, shards).choose_next_generation(lost, SPARES[:spares])
    assert ([member.pid for member in chosen.members], chosen.shards) == (members, left)
    assert chosen.shape == shape
    uneven = _generation(4, ReplicaShape(1, 4, 1, [1, 2, 4])).choose_next_generation({1}, [])
    assert len(uneven.members) == uneven.shards == 2


def _list_local_ranks(processes: Iterable[RunProcess]) -> list[tuple[str, int, int | None]]:
    return [(process.machine, process.pid, process.local_rank) for process in processes]


def test_spares_get_the_local_ranks_of_lost_processes_on_their_machine() -> None:
    """
    Of two machines with three GPUs each, the first loses GPU 1, and the second GPUs 0 and 2.

    A spare without a free GPU on its machine waits on, and replicas keep their order.
    """
    members = [RunProcess(machine, 10 + rank, rank, 3) for machine in ("a", "b") for rank in range(3)]
    spares = [RunProcess(machine, pid, None, 3) for machine, pid in (("a", 20), ("a", 21), ("b", 22), ("b", 23))]
    generation = Generation("run", 0, members, ReplicaShape(1, 1, 1, range(1, 7)))
    chosen = generation.choose_next_generation({1, 3, 5}, spares)
    left = [("a", 10, 0), ("a", 12, 2), ("b", 11, 1)]
    assert _list_local_ranks(chosen.members) == [*left, ("a", 20, 1), ("b", 22, 0), ("b", 23, 2)]
    shrunk = generation.choose_next_generation({1, 2}, [spares[0], spares[2]])
    assert _list_local_ranks(shrunk.members) == [("a", 10, 0), ("b", 10, 0), ("b", 11, 1), ("b", 12, 2), ("a", 20, 1)]
    assert not assign_local_ranks(members, spares)


def test_former_members_keep_their_local_ranks_before_new_spares_get_one() -> None:
    """A rank waiting because its replica is incomplete still uses its GPU; if it is taken, it moves to another."""
    former, new = RunProcess("a", 11, 1, 4), RunProcess("a", 20, None, 4)
    live = [RunProcess("a", 10, 0, 4)]
    assert _list_local_ranks(assign_local_ranks(live, [new, former])) == [("a", 11, 1), ("a", 20, 2)]
    taken = [*live, RunProcess("a", 12, 1, 4)]
    assert _list_local_ranks(assign_local_ranks(taken, [new, former])) == [("a", 11, 2), ("a", 20, 3)]


def test_without_hot_spares_equal_local_ranks_exclude_nobody() -> None:
    """A launcher may give every process LOCAL_RANK 0 and a GPU of its own, and a restarted one keeps it."""
    restarted = RunProcess.from_launch(Launch(local_rank=0), is_member=False)
    live = RunProcess.from_launch(Launch(local_rank=0), is_member=True)
    assert _list_local_ranks(assign_local_ranks([live], [restarted])) == [(live.machine, live.pid, None)]


@pytest.mark.parametrize(("is_member", "local_rank"), [(True, 2), (False, None)])
def test_a_hot_spare_has_no_local_rank_before_it_joins(is_member: bool, local_rank: int | None) -> None:
    """The launcher gives it a live process's."""
    launch = Launch(local_rank=2, local_world_size=4, spares=1)
    assert RunProcess.from_launch(launch, is_member=is_member).local_rank == local_rank


@pytest.mark.parametrize(("expert", "count"), [(1, 6), (2, 6), (4, 6), (8, 3), (3, 2), (24, 1)])
def test_replica_shapes_number_ranks_like_the_mesh(expert: int, count: int) -> None:
    """A replica's ranks differ in all dimensions but data_replicate or, with experts, expert_replicate."""
    sizes = {"pipeline": 2, "data_replicate": 6, "data_shard": 2, "context": 1, "tensor": 2}
    shape = ReplicaShape(2, 2, 2, range(1, 13), expert)
    assert shape.list_ranks_by_replica(count) == Layout(sizes, expert).list_rank_sets(*MODEL)
    assert shape.find_max_replica_count(48) == count and shape.find_max_replica_count(47) == count - 1


def test_shards_shrink_to_a_number_with_whole_sets_of_experts() -> None:
    """If three of four shards are left, two continue: two sets of experts can't be divided among three."""
    shape = ReplicaShape(1, 4, 1, [1, 2, 3, 4], expert=2).shrink(3)
    assert shape is not None and (shape.shards, shape.size) == (2, 2)


def test_a_generation_renumbers_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment describes the new launch, and JSON keeps every field."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "7")
    generation = _generation(3, ReplicaShape(1, 1, 1, [3]), shards=2)
    generation.set_rank_environment(2)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("2", "3", "7")
    spare = RunProcess("elsewhere", 100, 1, 2)
    following = attrs.evolve(generation, members=[*generation.members[:2], spare])
    Generation.from_json(following.to_json()).set_rank_environment(2)
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("2", "1")
    assert Generation.from_json(generation.to_json()) == generation
