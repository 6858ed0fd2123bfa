"""The checkpointer of one rank."""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drawloom.components.checkpoint.checkpointer import Checkpointer
from drawloom.components.checkpoint.peer_memory import PeerMemory, StateMemory
from drawloom.components.checkpoint.reader import load_node_state
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.ports.run import Cadence, Step
from drawloom.components.storage import durable_files
from drawloom.graph import ResolvedRecipe, UserError
from drawloom.graph.recipe.lockfile import RecipeChange
from support.checkpoints import ShardedNode, SingleRankMesh, StateNode, checkpointer, restore_step, save_steps, state_of
from support.disk import Call, watch_calls
from support.steps import make_skipped_step


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def _train(node: Checkpointer, memory: StateNode, total: int, make: Callable[..., Step] = Step) -> None:
    for index in range(1, total + 1):
        memory.state = state_of(index)
        node.run_phase(make(index, total))


class TorchOptimizer:
    """A real AdamW whose state is keyed by parameter names."""

    def __init__(self) -> None:
        self.module = nn.Linear(3, 2)
        self.adam = torch.optim.AdamW(self.module.parameters(), lr=0.1)

    def step(self) -> None:
        """Take an optimizer step."""
        self.adam.zero_grad()
        self.module(torch.ones(2, 3)).square().sum().backward()
        self.adam.step()

    def state_dict(self) -> dict[str, Any]:
        """Parameters and moments by name."""
        named = dict(self.module.named_parameters())
        return {
            "weights": dict(self.module.state_dict()),
            "moments": {name: dict(self.adam.state[p]) for name, p in named.items() if p in self.adam.state},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, also before the first step."""
        self.module.load_state_dict(state["weights"])
        for name, parameter in self.module.named_parameters():
            self.adam.state[parameter] = {key: part.clone() for key, part in state["moments"][name].items()}


@pytest.mark.parametrize(
    ("every", "steps"), [(2, [2, 4, 5]), (5, [5]), (7, [5]), (1, [1, 2, 3, 4, 5]), ("last", [5]), ("never", [])]
)
def test_every_cadence_but_never_has_the_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: Cadence, steps: list[int]
) -> None:
    """The cadence adds steps; with "never" a full disk is no obstacle, and a stop saves nothing either."""
    if every == "never":
        monkeypatch.setattr(durable_files, "count_free_bytes", lambda _: 0)
    memory = StateNode()
    node = checkpointer(tmp_path, {"memory": memory}, every=every, keep=9)
    assert node.restore() == 0
    _train(node, memory, 5)
    assert node.save(Step(5, 9)) == bool(steps)
    assert _steps(tmp_path) == steps
    if steps:
        assert restore_step(tmp_path) == 5


def test_a_skipped_step_is_saved_too(tmp_path: Path) -> None:
    """Its update was skipped, but the run is one step further."""
    memory = StateNode()
    _train(checkpointer(tmp_path, {"memory": memory}, every=1), memory, 1, make_skipped_step)
    assert restore_step(tmp_path) == 1


@pytest.mark.parametrize(("keep", "steps"), [(1, [6]), (2, [5, 6]), (9, [1, 2, 3, 4, 5, 6])])
def test_the_newest_checkpoints_are_kept(tmp_path: Path, keep: int, steps: list[int]) -> None:
    """Exactly `keep` checkpoints remain, and no trace of the others."""
    memory = StateNode()
    _train(checkpointer(tmp_path, {"memory": memory}, every=1, keep=keep), memory, 6)
    assert _steps(tmp_path) == steps
    assert len(os.listdir(tmp_path / "checkpoints")) == len(steps)


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    """keep = 0 and a cadence of 0 steps are invalid settings."""
    for settings in ({"keep": 0}, {"every": 0}):
        with pytest.raises(ValueError, match="less than 1"):
            checkpointer(tmp_path, {}, **settings)


def test_a_committed_step_is_not_saved_again(tmp_path: Path) -> None:
    """A signal on the last step saves it once, also after a restore."""
    memory, calls = StateNode(state_of(4)), list[Call]()
    node = checkpointer(tmp_path, {"memory": memory})
    node.save(Step(4, 4))
    with watch_calls(calls.append):
        node.save(Step(4, 4))
        node.run_phase(Step(4, 4))
    again = checkpointer(tmp_path, {"memory": memory})
    assert again.restore() == 4
    with watch_calls(calls.append):
        again.save(Step(4, 4))
    assert calls == []


@pytest.mark.parametrize(("done", "steps"), [(5, [5, 10]), (9, [5, 10]), (10, [5, 11]), (12, [5, 13])])
def test_a_save_interrupted_by_a_loss_is_made_after_the_next_step(
    tmp_path: Path, done: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a recovery from memory a checkpoint is missing if the cadence has passed since the newest one on disk."""
    memory = StateNode(state_of(5))
    checkpointer(tmp_path, {"memory": memory}, every=5).save(Step(5, 20))
    node = checkpointer(tmp_path, {"memory": memory}, every=5)
    monkeypatch.setattr(PeerMemory, "restore", lambda self, newest_on_disk: done)
    node._joins_others, node._peers = (
        True,
        PeerMemory(StateMemory(), SingleRankMesh(), {}, "never", SingleProcess(), ()),
    )
    assert node.restore() == done
    for index in range(done + 1, steps[-1] + 2):
        node.run_phase(Step(index, 20))
    assert _steps(tmp_path) == steps


def test_a_step_whose_save_failed_is_saved_again(tmp_path: Path) -> None:
    """The step does not count as saved after an error."""
    memory = StateNode({"bad": {1, 2}})
    node = checkpointer(tmp_path, {"memory": memory})
    for _ in range(2):
        with pytest.raises(TypeError, match="memory/bad is a set, which can't be saved"):
            node.save(Step(1, 2))
    memory.state = state_of(1)
    node.save(Step(1, 2))
    assert restore_step(tmp_path) == 1


def test_a_real_optimizer_resumes_bit_exactly(tmp_path: Path) -> None:
    """A new AdamW loads moments and weights, and five more steps give the same bits."""
    straight, resumed = TorchOptimizer(), TorchOptimizer()
    for _ in range(3):
        straight.step()
    checkpointer(tmp_path, {"optimizer": straight}).save(Step(3, 8))
    assert checkpointer(tmp_path, {"optimizer": resumed}).restore() == 3
    for _ in range(5):
        straight.step()
        resumed.step()
    for mine, theirs in zip(straight.module.parameters(), resumed.module.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_each_checkpoint_contains_the_recipe(tmp_path: Path) -> None:
    """The text is unchanged, with its hash in the manifest."""
    checkpointer(tmp_path, {}, recipe=ResolvedRecipe("# été\n", "the hash")).save(Step(1, 1))
    folder = tmp_path / "checkpoints" / "step-1"
    assert (folder / "recipe.lock.toml").read_text("utf-8") == "# été\n"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"], manifest["recipe"], manifest["world_size"]) == (3, 1, "the hash", 1)


def test_leftovers_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    """Temporary and trash folders are removed when the next run opens, and nothing else."""
    save_steps(tmp_path, 1)
    for name in (".tmp-step-2", ".trash-step-0", ".damaged-step-3-1", "notes"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "file").write_text("")
    checkpointer(tmp_path, {})
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [".damaged-step-3-1", "notes", "step-1"]


def test_a_pipe_among_the_leftovers_blocks_no_start(tmp_path: Path) -> None:
    """A pipe under the name of a leftover is removed, and nothing waits for its writer."""
    save_steps(tmp_path, 1)
    for name in (".trash-step-0", ".tmp-step-2"):
        os.mkfifo(tmp_path / "checkpoints" / name)
    checkpointer(tmp_path, {})
    assert os.listdir(tmp_path / "checkpoints") == ["step-1"]


def test_a_dangling_link_does_not_take_the_name_of_a_checkpoint(tmp_path: Path) -> None:
    """A stranger's link under a step's name is moved aside, and the step is saved."""
    save_steps(tmp_path, 1)
    (tmp_path / "checkpoints" / "step-2").symlink_to("gone")
    save_steps(tmp_path, 2)
    assert restore_step(tmp_path) == 2
    assert sorted(os.listdir(tmp_path / "checkpoints")) == [".damaged-step-2-1", "step-1", "step-2"]


def test_a_link_among_the_leftovers_blocks_no_start(tmp_path: Path) -> None:
    """A start removes the link, and leaves its target alone."""
    save_steps(tmp_path, 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("")
    (tmp_path / "checkpoints" / ".trash-step-0").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "checkpoints" / ".tmp-step-2").symlink_to("gone")
    checkpointer(tmp_path, {})
    assert os.listdir(tmp_path / "checkpoints") == ["step-1"]
    assert os.listdir(tmp_path / "elsewhere") == ["file"]


def test_a_corrupt_checkpoint_neither_counts_nor_expires(tmp_path: Path) -> None:
    """After a fallback from a flipped bit, retention keeps the valid ones, and the corrupt one stays for inspection."""
    save_steps(tmp_path, 1, 2, 3)
    corrupt = tmp_path / "checkpoints" / "step-3" / "rank-0.safetensors"
    data = bytearray(corrupt.read_bytes())
    data[-1] ^= 1
    corrupt.write_bytes(data)
    memory = StateNode()
    node = checkpointer(tmp_path, {"memory": memory}, keep=1)
    assert node.restore() == 2
    memory.state = state_of(4)
    node.save(Step(4, 9))
    assert _steps(tmp_path) == [3, 4]
    assert corrupt.read_bytes() == bytes(data)
    assert restore_step(tmp_path) == 4


def test_the_checkpoint_just_saved_never_expires(tmp_path: Path) -> None:
    """It is kept even among checkpoints with higher steps in the same folder."""
    save_steps(tmp_path, 7, 8, 9)
    save_steps(tmp_path, 1, 2, keep=1)
    assert _steps(tmp_path) == [2, 7, 8, 9]


def test_a_corrupt_step_can_be_saved_again(tmp_path: Path) -> None:
    """The new one takes its place and the corrupt one is kept under another name, also twice."""
    for _ in range(2):
        save_steps(tmp_path, 1, 2)
        (tmp_path / "checkpoints" / "step-2" / "rank-0.json").write_text("{}")
        memory = StateNode()
        node = checkpointer(tmp_path, {"memory": memory}, keep=1)
        assert node.restore() == 1
        memory.state = state_of(2)
        node.save(Step(2, 9))
        assert restore_step(tmp_path) == 2
        memory.state = state_of(3)
        node.save(Step(3, 9))
        assert _steps(tmp_path) == [3]  # the good one counts again
        shutil.rmtree(tmp_path / "checkpoints" / "step-3")
    kept = [name for name in os.listdir(tmp_path / "checkpoints") if name.startswith(".damaged-step-2-")]
    assert len(kept) >= 2
    assert (tmp_path / "checkpoints" / min(kept) / "rank-0.json").exists()


def test_nodes_that_differ_are_all_listed(tmp_path: Path) -> None:
    """With the same recipe a checkpoint has exactly the run's nodes: missing and unexpected ones are listed."""
    checkpointer(tmp_path, {"a": StateNode(), "b": StateNode(), "gone": StateNode()}).save(Step(1, 1))
    with pytest.raises(UserError) as caught:
        checkpointer(tmp_path, {"a": StateNode(), "b": StateNode(), "new": StateNode(), "newer": StateNode()}).restore()
    assert "has no state of [new], [newer]" in str(caught.value)
    assert "[gone]" in str(caught.value)


def test_nodes_that_the_recipe_changed_may_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With a node added or removed by the recipe, the new one keeps its initial state, and the rest is restored."""
    caplog.set_level(logging.INFO)
    nodes = {"a": StateNode({"x": 1}), "trackers.aim": StateNode(), "ema": ShardedNode({"w": {"average": 1}})}
    checkpointer(tmp_path, nodes).save(Step(1, 1))
    changes = [RecipeChange(node, "", "old", "new", "safe") for node in ("ema", "trackers.aim", "trackers.jsonl")]
    recipe = ResolvedRecipe("text", "hash", False, lambda older: changes if older == "format = 1\n" else [])
    old, new = StateNode(), StateNode({"fresh": True})
    assert checkpointer(tmp_path, {"a": old, "trackers.jsonl": new}, recipe=recipe).restore() == 1
    assert (old.state, new.state) == ({"x": 1}, {"fresh": True})
    assert "no state of [trackers.jsonl], which the recipe added" in caplog.text


@pytest.mark.parametrize("error", [KeyError("moment of 'w' is missing"), ValueError("moment of 'w' is missing")])
def test_a_node_that_refuses_its_state_is_named(tmp_path: Path, error: Exception) -> None:
    """The error has the checkpoint, the node, and the node's message."""

    class Picky(StateNode):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise error

    save_steps(tmp_path, 1)
    with pytest.raises(UserError) as caught:
        checkpointer(tmp_path, {"memory": Picky()}).restore()
    folder = tmp_path / "checkpoints" / "step-1"
    why = "does not fit the node: moment of 'w' is missing; undo what was changed, or use another run name"
    assert str(caught.value) == f"{folder}: its state of [memory] {why}"


def test_states_without_tensors_are_restored(tmp_path: Path) -> None:
    """A data loader has one number, and an optimizer before its first step has an empty state."""
    states = {"loader": StateNode({"position": 12}), "optimizer": StateNode({}), "none": StateNode({"run": None})}
    checkpointer(tmp_path, states).save(Step(1, 1))
    fresh = {name: StateNode({"other": 1}) for name in states}
    checkpointer(tmp_path, fresh).restore()
    assert {name: node.state for name, node in fresh.items()} == {
        "loader": {"position": 12},
        "optimizer": {},
        "none": {"run": None},
    }
    assert load_node_state(tmp_path / "checkpoints" / "step-1", "loader") == {"position": 12}


def test_a_failed_removal_of_an_expired_checkpoint_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run continues, as its new checkpoint is committed."""
    save_steps(tmp_path, 1)

    def refuse(_paths: Any) -> None:
        raise PermissionError(13, "Permission denied", "step-1")

    monkeypatch.setattr("drawloom.components.checkpoint.commit.remove_checkpoints", refuse)
    save_steps(tmp_path, 2, keep=1)
    assert restore_step(tmp_path) == 2
    assert "could not be removed" in caplog.text


def test_restoring_changes_nothing_on_disk(tmp_path: Path) -> None:
    """A run killed while loading, even repeatedly, neither loses nor fills anything."""
    save_steps(tmp_path, 1, 2)
    path = tmp_path / "checkpoints/step-2/rank-0.json"
    path.write_bytes(path.read_bytes() + b" ")
    node, calls = checkpointer(tmp_path, {"memory": StateNode()}), list[Call]()
    with watch_calls(calls.append):
        assert node.restore() == 1
    assert calls == []
