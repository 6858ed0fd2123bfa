"""`check` finds schedules, meshes and models that do not fit together."""

from pathlib import Path

import pytest

from drawloom.components.pipeline.program.notation import format_program_csv
from drawloom.graph.problems import Problem
from drawloom.graph.project import Project
from support.schedules import schedule


def problems(*words: str) -> list[Problem]:
    """Return the problems reported by `check` in the first run with these values."""
    project = Project.from_package("drawloom")
    return project.graph(project.load("first_run", overrides=words)).errors


def test_each_stage_wants_a_layer() -> None:
    """More stages than layers are a problem, with the numbers to write instead."""
    words = ("mesh.pipeline=2", "schedule.use=pipeline.schedules.interleaved_1f1b", "schedule.stages_per_rank=4")
    (problem,) = problems(*words)
    assert (problem.node, problem.text) == ("mesh", "4 layers can't be split over 2 ranks with 4 stages on each")
    assert problem.hint == "write pipeline = 1 or less, or write num_hidden_layers = 8 or more in [model]"
    (problem,) = problems("mesh.pipeline=9")
    assert problem.text == "4 layers can't be split over 9 ranks with 1 stage on each"
    assert problems(*words, "model.num_hidden_layers=8") == problems(*words, "mesh.pipeline=1") == []


@pytest.mark.parametrize("name", ["dual_pipe_v", "zero_bubble_v", "interleaved_1f1b", "v_min"])
def test_microbatches_never_are_a_problem(name: str) -> None:
    """Three microbatches, for two ranks with two stages each, fit every schedule."""
    words = (f"schedule.use=pipeline.schedules.{name}", "mesh.pipeline=2", "batch.global_size=3", "batch.micro_size=1")
    assert problems(*words) == []


def test_a_table_for_other_ranks_is_refused(tmp_path: Path) -> None:
    """A table for another number of ranks is one problem, and so is a file without a table."""
    path = tmp_path / "table.csv"
    path.write_text(format_program_csv(schedule("gpipe").program(2, 4)))
    words = ("schedule.use=pipeline.from_csv", f"schedule.path={path}")
    (problem,) = problems(*words)
    assert (problem.node, problem.text) == ("mesh", f"{path} is a schedule for 2 ranks, not 1")
    assert problems(*words, "mesh.pipeline=2") == []
    path.unlink()
    (problem,) = problems(*words)
    assert (problem.node, problem.text) == ("schedule", f"{path} can't be read: No such file or directory")


def test_a_schedule_reports_problems_of_its_settings() -> None:
    """A memory limit below one microbatch, and too few slices, are problems of the schedule, not of the mesh."""
    words = ("mesh.pipeline=2", "schedule.use=pipeline.schedules.auto")
    for setting, text in (
        ("schedule.memory=0.5", "memory = 0.5: a microbatch's activations are 1 on a rank; write more"),
        (
            "schedule.slices=[1.0]",
            "1 slices of the model are too few for 2 stages; write 2 or more in every setting that lists slices",
        ),
    ):
        (problem,) = problems(*words, setting)
        assert (problem.node, problem.text) == ("schedule", text)
