"""Waiting for admission to a run."""

import json
import signal
import subprocess
import time
from collections.abc import Sequence

import attrs
import pytest
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

from drawloom.components.distributed.generation import Generation, ReplicaShape, RunProcess
from drawloom.components.distributed.launch_store import Failure
from drawloom.components.distributed.membership import CURRENT, MemberWatch, Spares, wait_as_spare
from drawloom.graph import UserError
from drawloom.graph.problems import ReportedError

OWN = RunProcess.of_this_process()
GONE = RunProcess(OWN.machine, 2**22)  # no process: the largest id is one less


@attrs.define
class LaunchStore:
    """A launch's store in this process, with the members of a run's newest generation."""

    keys: HashStore = attrs.field(factory=HashStore)

    @property
    def newest(self) -> Generation:
        return Generation.from_json(self.store.get(CURRENT).decode())

    @property
    def store(self) -> PrefixStore:
        return PrefixStore("any", self.keys)

    def write(self, number: int, members: Sequence[RunProcess], stages: int = 1) -> Generation:
        """Write a generation of replicas with so many stages as the newest one, and return it."""
        generation = Generation("run", number, members, ReplicaShape(stages, 1, 1, [1, 2]))
        self.store.set(CURRENT, generation.to_json())
        return generation


@pytest.fixture
def launch() -> LaunchStore:
    """Return a launch's store."""
    return LaunchStore()


def test_a_spare_hears_every_rank_and_takes_silence_for_a_loss(
    launch: LaunchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat of the last rank is enough, also if the first two are lost; without any, the run counts as gone."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    launch.write(0, [RunProcess("elsewhere", rank) for rank in range(3)])
    members = MemberWatch(launch.store, 5.0)
    for now[0] in (0.0, 4.0, 8.0, 12.0):
        launch.keys.add("drawloom/run/0/beat/2", 1)
        assert not members.look_and_check_if_lost()
    now[0] = 17.5
    assert members.look_and_check_if_lost()


@pytest.mark.parametrize("agreed", [False, True])
def test_a_spare_replaces_all_lost_members(
    launch: LaunchStore, capfd: pytest.CaptureFixture[str], agreed: bool
) -> None:
    """Also if the last members had agreed on the next generation, and nobody wrote it: its members are lost, too."""
    lost = launch.write(3, [GONE, GONE])
    if agreed:
        following = attrs.evolve(lost, number=4, members=[GONE])
        lost.get_store(launch.store).set("following", following.to_json())
    generation = wait_as_spare(launch.store, "run", OWN, silence=60)
    assert generation.members == [RunProcess.of_this_process()] and generation.number == 4 + agreed
    assert launch.newest == generation
    text = f"all processes are gone; 0 of {2 - agreed} processes continue; 1 process joins\n"
    assert capfd.readouterr().err == text


def test_silent_members_are_lost_when_a_spare_replaces_them(launch: LaunchStore) -> None:
    """So suspended members end themselves."""
    lost = launch.write(0, [RunProcess("elsewhere", 1)])
    assert wait_as_spare(launch.store, "run", OWN, silence=0.2).members == [RunProcess.of_this_process()]
    assert lost.get_store(launch.store).check(["broken", "lost/0"])


def test_a_joining_spare_ends_the_lost_process_whose_gpu_it_gets(launch: LaunchStore) -> None:
    """A stopped process on a machine without another member is killed by nobody else, and holds its GPU's memory."""
    with subprocess.Popen(["sleep", "60"]) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        lost = launch.write(0, [RunProcess("elsewhere", 1), RunProcess(OWN.machine, stopped.pid)])
        store = lost.get_store(launch.store)
        store.set("lost/1", "is silent")
        members = MemberWatch(launch.store, 60)
        members.look_and_check_if_lost()
        members.end_lost_processes()
        assert stopped.poll() == -signal.SIGKILL
        members.close()


@pytest.mark.parametrize(
    ("key", "value", "code"), [("failure", json.dumps(attrs.asdict(Failure(0, "a bug", 3))), 3), ("exiting/1", "1", 0)]
)
def test_spares_do_not_repeat_a_run_whose_members_have_ended(
    launch: LaunchStore, key: str, value: str, code: int
) -> None:
    """A member's failure or normal end counts, though the announcing member was killed."""
    launch.write(0, [GONE, GONE]).get_store(launch.store).set(key, value)
    with pytest.raises(ReportedError) as caught:
        wait_as_spare(launch.store, "run", OWN, silence=60)
    assert caught.value.exit_code == code


def test_too_few_spares_for_a_mesh_end_with_a_sentence(launch: LaunchStore) -> None:
    """One process can't have both stages; another spare may come until the members count as silent."""
    launch.write(0, [GONE, GONE], stages=2)
    with pytest.raises(UserError, match="all processes of the run are lost, and the waiting ones are too few"):
        wait_as_spare(launch.store, "run", OWN, silence=0.5)
    spares = Spares(PrefixStore("run", launch.store))
    spares.register(RunProcess("elsewhere", 7))
    assert len(wait_as_spare(launch.store, "run", OWN, silence=60).members) == 2
