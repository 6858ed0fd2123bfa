"""Finding the newest valid checkpoint."""

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drawloom.components.checkpoint.reader import find_newest_valid_checkpoint, load_node_state
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.checkpoints import ShardedNode, StateNode, checkpointer, restore_step, save_steps, state_of

FILES = ["rank-0.safetensors", "rank-0.json", "recipe.lock.toml", "manifest.json"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    bit = random.Random(path.name).randrange(len(data) - 1)
    data[bit] ^= 1 << bit % 8
    path.write_bytes(data)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3)


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _zeros(path: Path) -> None:
    """Zero the second half of the file, as a lost write does."""
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2] + bytes(size - size // 2))


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def _other_step(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-2" / path.name, path)


FAULTS: list[Callable[[Path], None]] = [_flip, _truncate, _empty, _zeros, _pipe, _link, Path.unlink]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_corrupt_file_is_named_and_the_previous_step_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: Callable[[Path], None], name: str
) -> None:
    """For any fault in any file, the warning names the file, and the checkpoint is not removed."""
    save_steps(tmp_path, 1, 2, 3)
    folder = tmp_path / "checkpoints" / "step-3"
    fault(folder / name)
    before = sorted(os.listdir(folder))
    assert restore_step(tmp_path) == 2
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.startswith(f"{folder} is corrupt and skipped: {name} ")
    assert sorted(os.listdir(folder)) == before


@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-0.json", "manifest.json"])
def test_a_file_of_another_step_is_corrupt(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """A valid file is detected if it is not the one committed there."""
    save_steps(tmp_path, 1, 2, 3)
    _other_step(tmp_path / "checkpoints" / "step-3" / name)
    assert restore_step(tmp_path) == 2
    assert name in caplog.text


def test_an_extra_file_is_corrupt(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A checkpoint contains only its committed files."""
    save_steps(tmp_path, 1, 2)
    (tmp_path / "checkpoints" / "step-2" / "rank-1.safetensors").write_bytes(b"")
    assert find_newest_valid_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-1"
    assert "rank-1.safetensors is not in the manifest" in caplog.text


def test_the_newest_is_the_one_of_the_highest_step(tmp_path: Path) -> None:
    """Steps are compared as numbers; dates do not matter; other names are ignored."""
    save_steps(tmp_path, 9, 10)
    os.utime(tmp_path / "checkpoints" / "step-10", (0, 0))
    for name in (".tmp-step-11", ".trash-step-12", "step-013", "step-x", ".damaged-step-14-1"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert find_newest_valid_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-10"


def test_a_dangling_link_is_corrupt(tmp_path: Path) -> None:
    """A dangling link with a checkpoint's name is skipped, and named if there is no other checkpoint."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-3").symlink_to("gone")
    with pytest.raises(UserError, match="step-3: it is a symbolic link"):
        find_newest_valid_checkpoint(tmp_path)
    save_steps(tmp_path, 1)
    assert find_newest_valid_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-1"


def test_without_checkpoints_newest_is_none(tmp_path: Path) -> None:
    """Neither a missing nor an empty folder is an error."""
    assert find_newest_valid_checkpoint(tmp_path) is None
    save_steps(tmp_path)
    assert find_newest_valid_checkpoint(tmp_path) is None
    assert restore_step(tmp_path) == 0


def test_if_none_is_valid_all_are_listed(tmp_path: Path) -> None:
    """The run does not restart from step 0 over possibly repairable checkpoints."""
    save_steps(tmp_path, 1, 2)
    for step in (1, 2):
        (tmp_path / "checkpoints" / f"step-{step}" / "rank-0.json").unlink()
    with pytest.raises(UserError) as caught:
        restore_step(tmp_path)
    lines = str(caught.value).splitlines()
    assert [line.strip() for line in lines[1:3]] == [
        f"{tmp_path}/checkpoints/step-{step}: rank-0.json is missing" for step in (2, 1)
    ]


def test_a_checkpoint_that_expires_while_being_read_is_not_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A command that reads while the run saves finds the newer checkpoint."""
    from drawloom.components.checkpoint import commit, reader

    save_steps(tmp_path, 1)
    verify = reader.verify_checkpoint

    def verify_and_rotate(checkpoint: Path) -> commit.Manifest:
        if checkpoint.name == "step-1":
            save_steps(tmp_path, 2, keep=1)
        return verify(checkpoint)

    monkeypatch.setattr(reader, "verify_checkpoint", verify_and_rotate)
    assert find_newest_valid_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-2"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_state_of_one_node_can_be_loaded(tmp_path: Path) -> None:
    """A command reads the weights without a run; for a wrong name the error lists the right ones."""
    save_steps(tmp_path, 5)
    state = load_node_state(tmp_path / "checkpoints" / "step-5", "memory")
    assert torch.equal(state["weight"], state_of(5)["weight"])
    with pytest.raises(UserError, match=r"no state of \[stages\]; it has memory"):
        load_node_state(tmp_path / "checkpoints" / "step-5", "stages")


def test_the_state_of_one_node_is_verified(tmp_path: Path) -> None:
    """Loading one node verifies its file: a flipped bit is an error."""
    save_steps(tmp_path, 5)
    _flip(tmp_path / "checkpoints" / "step-5" / "rank-0.safetensors")
    with pytest.raises(UserError, match=r"step-5 is corrupt: rank-0.safetensors has a checksum mismatch"):
        load_node_state(tmp_path / "checkpoints" / "step-5", "memory")


def test_a_checkpoint_of_this_format_can_be_read(tmp_path: Path) -> None:
    """A checkpoint from the first version of the format loads, also into nodes whose entries are now sharded."""
    shutil.copytree(Path(__file__).parents[2] / "golden" / "checkpoints" / "format-3", tmp_path / "run")
    stages = ShardedNode({}, names=["embedding.weight", "norm"])
    optimizer = ShardedNode({}, names=["embedding.weight"])
    states = {"stages": stages, "optimizer": optimizer, "data": StateNode(), "odd": StateNode()}
    assert checkpointer(tmp_path / "run", states).restore() == 3
    assert torch.equal(stages.state["embedding.weight"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(stages.state["norm"], torch.ones(3, dtype=torch.bfloat16))
    assert optimizer.state["embedding.weight"]["step"] == 3
    assert states["data"].state == {"step": 3}
    assert str(states["odd"].state["a/b"]) == "[1, None, True, nan]"


def _many_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Save a checkpoint with four tensor files, the last one without any tensor of the first node."""
    monkeypatch.setattr("drawloom.components.checkpoint.commit.SHARD", 100)
    state = {f"w{number}": torch.full((20,), float(number)) for number in range(3)}
    checkpointer(folder, {"a": StateNode(state), "b": StateNode({"small": torch.ones(20), "odd": None})}).save(
        Step(1, 1)
    )
    return folder / "checkpoints/step-1"


def test_large_states_are_split_into_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written and read in parallel; a tensor is in one file, one larger than a file in its own."""
    checkpoint = _many_files(tmp_path, monkeypatch)
    names = ["rank-0.safetensors", *(f"rank-0-{number}.safetensors" for number in (1, 2, 3))]
    assert {path.name for path in checkpoint.glob("*.safetensors")} == {*names}
    assert [list(load_file(checkpoint / name)) for name in names] == [["a/w0"], ["a/w1"], ["a/w2"], ["b/small"]]
    a, b = StateNode(), StateNode()
    assert checkpointer(tmp_path, {"a": a, "b": b}).restore() == 1
    assert [a.state[f"w{number}"].tolist() for number in range(3)] == [[float(number)] * 20 for number in range(3)]
    assert b.state["small"].sum() == 20 and b.state["odd"] is None


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("fault", [_flip, _truncate, Path.unlink])
def test_corruption_of_any_of_several_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], None], number: int
) -> None:
    """Files this run does not need are checked too."""
    checkpoint = _many_files(tmp_path, monkeypatch)
    path = checkpoint / (f"rank-0-{number}.safetensors" if number else "rank-0.safetensors")
    fault(path)
    with pytest.raises(UserError, match=f"{path.name} "):
        checkpointer(tmp_path, {"a": StateNode(), "b": StateNode()}).restore()
    with pytest.raises(UserError, match=f"{path.name} "):
        checkpointer(tmp_path, {"a": ShardedNode({}, names=["w1"])}).restore()
