"""`drawloom schedule`."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from drawloom import Recipe
from drawloom.components.pipeline.program.notation import format_program_csv
from drawloom.graph.cli.main import main
from support.schedules import NAMES, schedule

Capture = pytest.CaptureFixture[str]


def run_schedule(capsys: Capture, *arguments: str, code: int = 0) -> str:
    """Return the output of the command: stdout if it succeeds, else stderr."""
    try:
        exit_code = main(["schedule", *arguments])
    except SystemExit as error:  # how argparse leaves
        exit_code = int(error.code or 0)
    said = capsys.readouterr()
    assert exit_code == code, said.err
    return said.err if code else said.out


def data(capsys: Capture, *arguments: str) -> Any:
    """Return the JSON output of the command, or the list of a comparison."""
    printed = json.loads(run_schedule(capsys, *arguments, "--format", "json"))
    return printed["schedules"] if "--compare" in arguments else printed


def test_a_schedule_is_simulated_by_its_name(capsys: Capture) -> None:
    """The printed numbers equal the simulation's, with and without costs."""
    sizes = ("dual_pipe_v", "--ranks", "8", "--microbatches", "32")
    summary = data(capsys, *sizes)
    assert list(summary) == [
        "schedule",
        "ranks",
        "stages_per_rank",
        "microbatches",
        "makespan",
        "ideal",
        "bubble",
        "span_bubble",
        "peak_activations",
        "peak_live_weights",
        "messages",
        "actions",
        "shard_actions",
        "transfers",
        "choice",
        "recompute",
        "measured_makespan",
        "activation_bytes",
    ]
    assert (summary["makespan"], summary["ideal"], summary["peak_activations"]) == (99.5, 96, [17] * 8)
    assert summary["actions"] == {"F": 512, "B": 420, "I": 92, "W": 92}
    assert data(capsys, *sizes, "--costs", "comm=0.125")["bubble"] == pytest.approx(0.079, abs=6e-4)
    assert data(capsys, *sizes, "--costs", "F=2,I=2,W=2,comm=0")["makespan"] == 199
    assert data(capsys, *sizes, "--costs", "B=3")["ideal"] > 96


def test_settings_of_a_schedule_are_values(capsys: Capture) -> None:
    """The node of a schedule by its name is called schedule; auto takes the costs."""
    words = ("--ranks", "4", "--microbatches", "8")
    assert data(capsys, "one_f_one_b", *words, "schedule.hide_latency=true")["peak_activations"] == [7, 5, 3, 1]
    assert data(capsys, "interleaved_1f1b", *words, "schedule.stages_per_rank=3")["stages_per_rank"] == 3
    assert "stages_per_rank" in run_schedule(capsys, "dual_pipe_v", *words, "schedule.stages_per_rank=3", code=2)
    assert max(data(capsys, "auto", *words, "schedule.memory=3")["peak_live_weights"]) <= 6
    late = ("--costs", "comm=1")
    assert data(capsys, "auto", *words, *late)["bubble"] < data(capsys, "dual_pipe_v", *words, *late)["bubble"]


def test_blocking_channels_take_longer(capsys: Capture) -> None:
    """Blocking ranks have a longer makespan."""
    words = ("gpipe", "--ranks", "4", "--microbatches", "8", "--costs", "comm=0.5")
    assert data(capsys, *words, "--channels", "blocking")["makespan"] > data(capsys, *words)["makespan"]


def test_a_recipe_gives_schedule_ranks_and_microbatches(capsys: Capture) -> None:
    """Schedule, ranks and microbatches come from the recipe; values on the command line override it."""
    words = ("mesh.pipeline=2", "batch.micro_size=2", "schedule.use=pipeline.schedules.zero_bubble_v")
    summary = data(capsys, "first_run", *words)
    assert [summary[key] for key in ("schedule", "ranks", "stages_per_rank", "microbatches")] == [
        "zero_bubble_v",
        2,
        2,
        8,
    ]
    assert data(capsys, "first_run", *words, "--microbatches", "3")["microbatches"] == 3
    assert data(capsys, "first_run", *words, "mesh.data_replicate=4")["microbatches"] == 2


def test_a_recipe_can_simulate_a_table(capsys: Capture, tmp_path: Path) -> None:
    """A schedule from a file is simulated like any other."""
    (tmp_path / "table.csv").write_text(format_program_csv(schedule("v_min").program(2, 16)))
    words = ("mesh.pipeline=2", "schedule.use=pipeline.from_csv", f"schedule.path={tmp_path}/table.csv")
    summary = data(capsys, "first_run", *words, "batch.micro_size=1")
    assert (summary["schedule"], summary["makespan"]) == ("pipeline.from_csv", 49.5)


def test_a_file_is_drawn_like_its_schedule(capsys: Capture, tmp_path: Path) -> None:
    """The command reads its own --format csv with the same figures; contradicting numbers fail."""
    words = ("v_min", "--ranks", "2", "--microbatches", "6")
    path = tmp_path / "table.csv"
    path.write_text(run_schedule(capsys, *words, "--format", "csv"))
    summary, wanted = data(capsys, str(path)), data(capsys, *words)
    assert summary == wanted | {"schedule": str(path)}
    assert data(capsys, str(path), "--costs", "F=2")["makespan"] > summary["makespan"]
    assert "--ranks 3:" in run_schedule(capsys, str(path), "--ranks", "3", code=2)
    assert "leave --compare out" in run_schedule(capsys, "--compare", *words[1:], "--format", "csv", code=2)
    assert "can't be read: No such file" in run_schedule(capsys, "nowhere.csv", code=1)


def test_the_picture_is_a_document(capsys: Capture) -> None:
    """With --format svg, stdout is XML and nothing else."""
    picture = run_schedule(capsys, "gpipe", "--ranks", "2", "--microbatches", "3", "--format", "svg")
    assert ElementTree.fromstring(picture).tag == "{http://www.w3.org/2000/svg}svg"


def test_text_shows_numbers_and_timeline(capsys: Capture) -> None:
    """Title, caption, a row for each rank, and the timeline."""
    lines = run_schedule(capsys, "gpipe", "--ranks", "2", "--microbatches", "2").splitlines()
    assert lines[0] == "gpipe: 2 ranks × 1 stage, 2 microbatches"
    assert lines[1] == "makespan 9, ideal 6: bubble 33.3%; longest span of a rank 9: bubble 33.3%"
    assert lines[3].split() == ["peak", "live", "until", "weights", "weights", "pending", "messages"]
    assert [line[:14] for line in lines[7:9]] == ["rank 0  F0 F1 ", "rank 1     F0 "]


def test_all_are_compared(capsys: Capture) -> None:
    """The table has a row for each schedule."""
    rows = run_schedule(capsys, "--compare", "--ranks", "8", "--microbatches", "32").splitlines()
    assert sorted(row.split()[0] for row in rows[1 : len(NAMES) + 1]) == sorted(NAMES)
    summaries = data(capsys, "--compare", "--ranks", "4", "--microbatches", "8")
    assert {item["schedule"]: item["makespan"] for item in summaries}["v_half"] == 26.5


def test_a_named_schedule_takes_part_in_the_comparison(capsys: Capture) -> None:
    """The table has a row for a schedule elsewhere, and none twice."""
    words = ("--compare", "--ranks", "2", "--microbatches", "2")
    output = run_schedule(capsys, "gpipe", *words)
    assert output == run_schedule(capsys, *words)


def test_a_run_is_a_recipe(capsys: Capture, tmp_path: Path) -> None:
    """All schedules are compared on its ranks and microbatches, and it has its own number of ranks."""
    (tmp_path / "recipe.lock.toml").write_text(Recipe.load("pipeline").to_resolved_toml())
    summaries = data(capsys, "--compare", str(tmp_path))
    assert {(item["ranks"], item["microbatches"]) for item in summaries} == {(2, 8)}
    assert "a recipe has its own number of ranks" in run_schedule(capsys, str(tmp_path), "--ranks", "4", code=2)


def test_a_comparison_keeps_the_model(capsys: Capture) -> None:
    """Stages share the costs of a rank's layers: all schedules have the same work, on any number of ranks."""
    summaries = data(capsys, "--compare", "--ranks", "2,4", "--microbatches", "4,8", "--costs", "F=2,I=2,W=2")
    assert {(item["ranks"], item["microbatches"], item["ideal"]) for item in summaries} == {
        (ranks, microbatches, 6.0 * microbatches) for ranks in (2, 4) for microbatches in (4, 8)
    }
    messages = {item["schedule"]: item["messages"] for item in summaries if item["ranks"] == 2}
    assert (messages["one_f_one_b"], messages["interleaved_1f1b"], messages["v_half"]) == (2 * 8, 3 * 2 * 8, 2 * 2 * 8)


SMALL = ("model.num_hidden_layers=4", "model.hidden_size=48", "model.intermediate_size=80", "vars.length=32")


def test_costs_are_planned(capsys: Capture) -> None:
    """In seconds, with bytes of activations; auto gets them as slices, and no published schedule is faster."""
    words = ("pipeline", *SMALL, "--costs", "plan", "--device", "cpu", "--microbatches", "4")
    summaries = {item["schedule"]: item for item in data(capsys, *words, "--compare")}
    assert min(item["makespan"] for item in summaries.values()) == pytest.approx(
        summaries["auto"]["makespan"], rel=1e-4
    )
    assert summaries["gpipe"]["activation_bytes"][0] > 1.5 * summaries["one_f_one_b"]["activation_bytes"][0]
    assert data(capsys, *words)["makespan"] == pytest.approx(summaries["one_f_one_b"]["makespan"])


def test_planned_schedules_have_no_more_stages_than_the_model_has_layers(capsys: Capture) -> None:
    """
    Four layers on three ranks compare only schedules with one stage a rank; five ranks are refused with the reason.
    """
    words = ("--compare", "pipeline", *SMALL, "--costs", "plan", "--device", "cpu", "--microbatches", "2", "--ranks")
    assert {item["stages_per_rank"] for item in data(capsys, *words, "3")} == {1}
    assert "4 layers can't be cut into" in run_schedule(capsys, *words, "5", code=2)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["dual_pipe", "--ranks", "2", "--microbatches", "4"], "did you mean 'pipeline.schedules.dual_pipe_v'?"),
        (["data.bytes", "--ranks", "2", "--microbatches", "4"], "data.bytes is not a schedule; `drawloom list"),
        (["first_run", "--ranks", "2"], "--ranks: a recipe has its own number of ranks; leave --ranks out"),
        (["gpipe", "--ranks", "2"], "the number of microbatches is unknown; write it, such as --microbatches 8"),
        (["gpipe", "--ranks", "0", "--microbatches", "4"], "'0' is not a positive integer"),
        (
            ["gpipe", "--ranks", "2", "--microbatches", "4", "--costs", "X=1"],
            "'X=1' is not a cost; write for example F=1",
        ),
        (["gpipe", "--ranks", "2", "--microbatches", "4", "--costs", "F=-1"], "F, B, I and W cost more than 0"),
        (["gpipe", "--ranks", "2", "--microbatches", "4", "--costs", "F=1e308"], "and none more than 1e+09"),
        (
            ["gpipe", "--ranks", "2", "--microbatches", "4", "schedule.x=1"],
            "command line: [schedule] 'pipeline.schedules.gpipe' has no setting",
        ),
        (["--ranks", "2"], "schedule takes a recipe, a CSV file, the name of a schedule and --ranks, or --compare"),
        (["--compare", "--microbatches", "2"], "--compare takes a recipe, or --ranks and --microbatches"),
        (["gpipe", "--ranks", "2,4", "--microbatches", "4"], "only --compare takes several values; add --compare"),
        (["gpipe", "--ranks", "2", "--microbatches", "4", "--costs", "plan"], "--costs plan needs a recipe to plan"),
        (["first_run", "--run", "."], "--run takes the schedule from the run's recipe"),
        (["--run", ".", "--microbatches", "3"], "--run takes the schedule from the run's recipe"),
        (["--run", ".", "schedule.use=pipeline.schedules.gpipe"], "--run takes the schedule from the run's recipe"),
        (
            ["mine.toml", "--ranks", "2", "--microbatches", "4"],
            "a recipe has its own number of ranks; leave --ranks out",
        ),
        (["no_such_recipe"], "no_such_recipe"),
        (["zero_bubble_v"], "zero_bubble_v is a schedule; write --ranks 4 --microbatches 8"),
        (
            ["zero_buble_v"],
            "there is no recipe or schedule 'zero_buble_v'; did you mean 'zero_bubble_v', with --ranks 4",
        ),
        (["zero_buble_v", "--ranks", "4"], "did you mean 'pipeline.schedules.zero_bubble_v'?"),
    ],
)
def test_wrong_arguments_are_user_errors(capsys: Capture, words: list[str], error: str) -> None:
    """An impossible command line is refused with exit code 2 and one sentence."""
    assert error in run_schedule(capsys, *words, code=2)


@pytest.mark.parametrize(("ranks", "microbatches"), [(100_000, 1), (64, 2000)])
def test_a_schedule_too_large_to_simulate_is_refused(
    capsys: pytest.CaptureFixture[str], ranks: int, microbatches: int
) -> None:
    """The refusal comes at once, and names the largest schedule that can be simulated."""
    words = ["one_f_one_b", "--ranks", str(ranks), "--microbatches", str(microbatches)]
    assert main(["schedule", *words]) == 2
    assert "take too long to simulate; write at most 1000 ranks" in capsys.readouterr().err


def test_a_recipe_with_shards_shows_when_they_are_gathered_and_reduced(capsys: Capture) -> None:
    """Mesh and stages determine the actions, costs how long they take; replicas are only reduced."""
    words = (
        "first_run",
        "mesh.pipeline=2",
        "batch.micro_size=2",
        "--microbatches",
        "4",
        "--costs",
        "unshard=1,reduce=1",
    )
    stage = [
        [action["action"] for action in rank] for rank in data(capsys, *words, "mesh.data_shard=2")["shard_actions"]
    ]
    assert stage == [["0UNSHARD0", "0REDUCE_GRAD3"], ["1UNSHARD0", "1REDUCE_GRAD3"]]
    by_layer = data(capsys, *words, "mesh.data_shard=2", "stages.reshard_after_forward=true")["shard_actions"]
    replicas = data(capsys, *words, "mesh.data_replicate=2", "stages.sync_each_microbatch=true")["shard_actions"]
    assert [[action["action"] for action in rank] for rank in by_layer] == [["0REDUCE_GRAD3"], ["1REDUCE_GRAD3"]]
    assert [[action["action"] for action in rank] for rank in replicas] == [["0REDUCE_GRAD3"], ["1REDUCE_GRAD3"]]
    by_microbatch = data(capsys, *words, "mesh.data_shard=2", "stages.sync_each_microbatch=true")["shard_actions"]
    assert [action["action"] for action in by_microbatch[0]][1:] == [
        *(f"0REDUCE_SCATTER{n}" for n in range(3)),
        "0REDUCE_GRAD3",
    ]
    assert data(capsys, *words[:-2])["shard_actions"] == []
    named = data(capsys, "one_f_one_b", "--ranks", "2", "--microbatches", "4", "--costs", "unshard=1")
    assert (
        len(named["shard_actions"]) == 2
        and named["makespan"] == 1 + data(capsys, "one_f_one_b", "--ranks", "2", "--microbatches", "4")["makespan"]
    )


def test_only_the_feature_offloads_stages(capsys: Capture) -> None:
    """A schedule with the time for copies chooses stages itself, and the simulation leaves its choice as it is."""
    auto = ("schedule.use=pipeline.schedules.auto", "schedule.memory=2.0", "schedule.offload=0.5")
    choices = (auto, ("offload.use=pipeline.offloaded",), ())
    assert [bool(data(capsys, "pipeline", *words)["transfers"]) for words in choices] == [False, True, False]
