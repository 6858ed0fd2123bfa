"""Reading the newest weights of an unfinished run."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from drawloom.components.checkpoint.reader import load_node_state
from drawloom.components.commands import _trained
from drawloom.components.commands.models.export import ExportCommand
from drawloom.graph import UserError
from drawloom.graph.cli.arguments import parse_command
from drawloom.graph.inspect.resolved import make_resolved_recipe
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import FILES, Schedule
from support.checkpoints import save_steps, state_of
from support.qwen3 import SIZES, dense


@attrs.define
class _Recipe:
    """A recipe with one node; the node keeps its loaded state."""

    text: str
    state: Any = None

    @property
    def graph(self) -> Any:
        return SimpleNamespace(implementers=lambda port: [])

    @contextmanager
    def open(self, names: Sequence[str], replacements: Any) -> Iterator[dict[str, Any]]:
        yield {names[0]: self}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def export(folder: Path, *words: str) -> ExportCommand:
    """Return a command with a run's weights."""
    return parse_command(ExportCommand, "export", [str(folder), "--to=exported", *words])


def test_a_checkpoint_is_taken_by_its_step_or_by_its_loss(tmp_path: Path) -> None:
    """The last step is the default, `--best` takes the lowest loss; a missing step's error lists the existing ones."""
    save_steps(tmp_path, 1, validation_loss=3.0)
    save_steps(tmp_path, 2, validation_loss=2.0)
    save_steps(tmp_path, 3)
    taken = [
        _trained._choose_checkpoint_if_any(export(tmp_path, *words), tmp_path)
        for words in ((), ("--step", "1"), ("--best",))
    ]
    assert [path and path.name for path in taken] == ["step-3", "step-1", "step-2"]
    with pytest.raises(UserError, match=r"--step 7: .* has checkpoints of steps 1, 2, 3"):
        _trained._choose_checkpoint_if_any(export(tmp_path, "--step", "7"), tmp_path)


@pytest.mark.parametrize("damaged", [b"[model\n", b"\xff"], ids=["no TOML", "no text"])
def test_a_damaged_recipe_is_named(tmp_path: Path, damaged: bytes) -> None:
    """Its file, the reason and the remedy are in one sentence."""
    (tmp_path / LOCK).write_bytes(damaged)
    with pytest.raises(UserError, match=rf"{LOCK} can't be read: .*; give another run folder"):
        _trained.find_base_folder_of_run(tmp_path)


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        ("mine", "mine is not a folder; did you mean 'runs/mine'?"),
        ("other", "other is not a folder; give the folder of a run, such as runs/first_run"),
        ("runs", "runs holds no finished checkpoint; give the folder of a run, such as runs/first_run"),
        (
            "runs/mine/checkpoints/step-1",
            "runs/mine/checkpoints/step-1 is a checkpoint; give the folder of its run, runs/mine",
        ),
    ],
)
def test_a_run_by_its_name_or_checkpoint_is_answered_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, said: str
) -> None:
    """A folder without checkpoints and a path that is not a folder have different messages."""
    (tmp_path / "runs/mine").mkdir(parents=True)
    save_steps(tmp_path / "runs/mine", 1)
    monkeypatch.chdir(tmp_path)
    assert str(_trained.missing_checkpoint_error(Path(folder))) == said


def test_best_needs_a_validation_loss(tmp_path: Path) -> None:
    """The message names the cadences that must coincide."""
    save_steps(tmp_path, 1)
    with pytest.raises(UserError, match=r"no checkpoint in .* has a validation loss; let checkpoint\.every"):
        _trained._choose_checkpoint_if_any(export(tmp_path, "--best"), tmp_path)


@pytest.mark.parametrize("moment", ["_load_recipe_for_one_process", "load_node_state"])
def test_a_checkpoint_removed_while_being_read_is_replaced_by_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """With fast rotation, `generate` and `export` never call a removed step corrupt."""
    save_steps(tmp_path, 1)
    read: dict[str, Any] = {
        "_load_recipe_for_one_process": lambda _project, lock, _files: _Recipe(lock.read_text()),
        "load_node_state": load_node_state,
    }
    began: list[Path] = []

    def rotating(*arguments: Any) -> Any:
        began.append(arguments[0])
        if len(began) == 1:
            save_steps(tmp_path, 2)
            shutil.rmtree(tmp_path / "checkpoints" / "step-1")
        return read[moment](*arguments)

    monkeypatch.setattr(_trained, "_load_recipe_for_one_process", read["_load_recipe_for_one_process"])
    monkeypatch.setattr(_trained, "find_only_node", lambda *_: "memory")
    monkeypatch.setattr(_trained, moment, rotating)
    project: Any = None
    with export(tmp_path).open_run(project) as run:
        assert torch.equal(run.nodes["memory"].state["weight"], state_of(2)["weight"])
    assert len(began) == 2


def test_a_checkpoint_that_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in an existing checkpoint is reported, and not retried for ever."""
    save_steps(tmp_path, 1)
    monkeypatch.setattr(_trained, "_load_recipe_for_one_process", lambda *_: _Recipe(""))
    monkeypatch.setattr(_trained, "find_only_node", lambda *_: "gone")
    project: Any = None
    with pytest.raises(UserError, match=r"has no state of \[gone\]"), export(tmp_path).open_run(project):
        pass


def load_for_one_process(folder: Path, **tables: Any) -> Recipe:
    """Return the recipe that commands make from a run's lock file, without problems."""
    (folder / "config.json").write_text(json.dumps(dense(**SIZES).hugging_face_config()))
    model = {"use": "model.auto", "path": str(folder)}
    recipe = Recipe.load("first_run").with_values({"model": None}).with_values({"model": model, **tables})
    (folder / LOCK).write_text(make_resolved_recipe(recipe.graph).lock, "utf-8")
    loaded = _trained._load_recipe_for_one_process(Project.from_package("drawloom"), folder / LOCK, folder / FILES)
    assert [str(problem) for problem in loaded.graph.problems] == []
    return loaded


def test_stages_that_share_a_model_keep_the_weights_they_need(tmp_path: Path) -> None:
    """A frozen model and adapters read the folder of their common model; the model itself has no weights."""
    recipe = load_for_one_process(
        tmp_path,
        lora={"use": "adapters.lora", "rank": 4, "alpha": 8.0, "targets": ["*.q_proj"]},
        stages={"adapters": ["@lora"]},
        reference={"use": "stages.frozen", "model": "@model"},
        loss={"use": "loss.distill"},
    )
    nodes = recipe.graph.nodes
    assert [nodes[name].settings["weights"] for name in ("stages", "reference")] == [tmp_path] * 2
    assert nodes["model"].settings["weights"] is False


def test_a_circular_pipeline_is_replaced_for_one_process(tmp_path: Path) -> None:
    """Its executor runs no other schedule, so it becomes the plain executor."""
    circular = {"executor": {"use": "pipeline.circular.executor"}, "schedule": {"use": "pipeline.schedules.circular"}}
    recipe = load_for_one_process(tmp_path, mesh={"pipeline": 2}, **circular)
    assert recipe.graph.nodes["executor"].spec.use == "pipeline.executor"


@pytest.mark.parametrize("use", ["pipeline.schedules.dual_pipe_v", "pipeline.from_csv"])
def test_schedules_are_replaced_for_one_process(tmp_path: Path, use: str) -> None:
    """An inline schedule for several ranks becomes one for a single rank."""
    table = tmp_path / "table.csv"
    table.write_text("0F0,,,0B0\n,1F0,1B0,\n", "utf-8")
    inline = {"use": use} | ({"path": str(table)} if use.endswith("csv") else {})
    recipe = load_for_one_process(tmp_path, executor={"schedule": inline}, mesh={"pipeline": 2})
    uses = [recipe.graph.nodes[name].spec.use for name in recipe.graph.implementers(Schedule)]
    assert uses == ["pipeline.schedules.one_f_one_b"] * 2
