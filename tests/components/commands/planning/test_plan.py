"""`drawloom plan`."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from drawloom.graph.cli.main import main

Capture = pytest.CaptureFixture[str]

EXPERTS = ("qwen3_30b_a3b", "vars.data=store", "vars.tokenizer=folder", "--device", "h100")

WHOLE = ("stages.recompute=none", "mesh.expert=1")


def run_plan(capsys: Capture, *arguments: str, code: int = 0) -> str:
    """Return the output of the command: stdout, or stderr for a mistake."""
    try:
        exit_code = main(["plan", *arguments])
    except SystemExit as error:  # how argparse leaves
        exit_code = int(error.code or 0)
    said = capsys.readouterr()
    assert exit_code == code, said.err
    return said.err if code == 2 else said.out


def data(capsys: Capture, *arguments: str, code: int = 0) -> Any:
    """Return the JSON output of the command."""
    return json.loads(run_plan(capsys, *arguments, "--format", "json", code=code))


def test_a_plan_of_a_thousand_ranks_has_the_memory_of_each(capsys: Capture) -> None:
    """It needs no GPU, process group or data; ranks in one stage are alike, and parts of memory and time add up."""
    mesh = ("mesh.pipeline=4", "mesh.tensor=2", "mesh.data_shard=16", "mesh.expert=8", "batch.global_size=1024")
    experts = 'stages.dispatcher={use="experts.all_to_all"}'
    began = time.process_time()
    printed_plan = data(
        capsys, *EXPERTS, "--ranks", "1024", *mesh, experts, "schedule.use=pipeline.schedules.zero_bubble_v"
    )
    assert time.process_time() - began < 20  # torch's compiler is imported, too; a quiet machine takes 3 s
    assert len(printed_plan["peak_memory_bytes"]) == printed_plan["ranks"] == 1024
    assert [printed_plan["peak_memory_bytes"][stage * 256] for stage in range(4)] == [
        row["peak"] for row in printed_plan["memory"]
    ]
    for memory in printed_plan["memory"]:
        kinds = [*memory["kept"].values(), *memory["activations"].values(), *memory["buffers"].values()]
        assert sum(kinds) + memory["peak_gradients"] == memory["peak"]
    parts = printed_plan["seconds"]
    assert sum(parts.values()) - parts["sending"] == pytest.approx(printed_plan["step_seconds"])
    assert printed_plan["tokens_per_second"] == pytest.approx(1024 * 4096 / printed_plan["step_seconds"])
    assert printed_plan["fits"]
    assert 0 < printed_plan["mfu"] < 1


def test_stages_add_up_to_ranks(capsys: Capture) -> None:
    """Stage parameters sum to the ranks' parameters, and the busiest rank's passes make the computing time."""
    words = ("pipeline", "--device", "cpu", "schedule.use=pipeline.schedules.interleaved_1f1b")
    printed_plan = data(capsys, *words, "model.num_hidden_layers=5")
    ranks = [[entry for entry in printed_plan["stages"] if entry["pipeline_rank"] == rank] for rank in (0, 1)]
    for memory, stages in zip(printed_plan["memory"], ranks, strict=True):
        assert sum(4 * stage["parameters"] for stage in stages) == memory["kept"]["parameters"]
        assert sum(4 * stage["trained_parameters"] for stage in stages) == memory["gradients"]
    seconds = [sum(stage["seconds"]["F"] + stage["seconds"]["B"] for stage in stages) for stages in ranks]
    assert max(seconds) * printed_plan["microbatches"] == pytest.approx(printed_plan["seconds"]["compute"])
    assert all(sum(stage["activations"].values()) > stage["sent_bytes"] for stage in printed_plan["stages"])


def test_a_plan_that_does_not_fit_says_so(capsys: Capture) -> None:
    """The output and the exit status say so, with remedies."""
    said = run_plan(capsys, *EXPERTS, "--ranks", "16", *WHOLE, "stages.sync_each_microbatch=false", code=1)
    assert ": too much" in said
    assert "stages.sync_each_microbatch = true  # " in said


def test_a_plan_is_a_table_of_ranks(capsys: Capture) -> None:
    """For a small recipe on this machine: subjects and kinds of memory in order, then how often to save."""
    *lines, empty, saves = run_plan(capsys, "pipeline", "--device", "cpu", "--mtbf", "500").splitlines()
    assert (empty, saves.split(" = ")[0]) == ("", "checkpoint.every")
    assert [line.split()[0] for line in lines[:6]] == ["device", "step", "memory", "time", "speed", "run"]
    assert lines[7].split()[1:] == ["rank", "0", "rank", "1"]
    assert lines[-1].startswith("in ")


def test_parts_of_a_step_that_round_to_nothing_are_left_out(capsys: Capture) -> None:
    """A rank without others has no bubble, whatever sums of its passes differ by."""
    time = run_plan(capsys, "first_run", "--device", "h200", "batch.micro_size=1").splitlines()[3]
    assert time.endswith("a step: passes 100.0%")


HEAD = {"head_dim": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1}
TINY = (*(f"model.{key}={value}" for key, value in HEAD.items()), "model.hidden_size=8", "model.intermediate_size=8")


@pytest.mark.parametrize(
    ("words", "unit", "scale"),
    [
        (("vars.length=16", "batch.global_size=2", "batch.micro_size=2", *TINY), "kB", 1e3),
        ((), "MB", 1e6),
        (("batch.global_size=64", "batch.micro_size=64"), "GB", 1e9),
    ],
)
def test_sizes_have_a_unit_in_which_they_are_seen(
    capsys: Capture, words: tuple[str, ...], unit: str, scale: float
) -> None:
    """The table is in the largest unit in which the peak is at least one, and agrees with the JSON's bytes."""
    plan = ("first_run", "--device", "cpu", *words)
    [peak] = data(capsys, *plan)["peak_memory_bytes"]
    assert 1 <= peak / scale < 1000
    lines = run_plan(capsys, *plan).splitlines()
    number, printed_unit = lines[2].split()[1:3]
    assert float(number) == pytest.approx(peak / scale, rel=0.01)
    assert (printed_unit, *lines[7].split()) == (unit, unit, "rank", "0")
    *sizes, total = (float(line.split()[-1]) for line in lines[9:-1])
    assert total == pytest.approx(peak / scale, abs=5e-4)
    assert sum(sizes) == pytest.approx(total, abs=0.01)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("first_run", "--device", "h10"), "did you mean 'h100'"),
        (("first_run", "--ranks", "0"), "not a positive integer"),
        (("first_run", "--mtbf", "0"), "not a number above 0"),
        (("first_run", "--save-seconds", "1", "--device", "cpu"), "--save-seconds needs --mtbf; add --mtbf"),
        (("pipeline", "--ranks", "3"), "multiple of"),
        (("pipeline", "--ranks", "2", "--search", "--floor"), "--floor: not allowed with"),
        (("first_run", "model.num_hidden_layers=0"), "num_hidden_layers"),
    ],
)
def test_mistakes_get_one_sentence(capsys: Capture, arguments: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    """A mistake prints one sentence without a traceback."""
    said = run_plan(capsys, *arguments, code=2)
    assert reason in said
    assert "Traceback" not in said


def test_a_plan_needs_a_recipe_unless_it_measures(capsys: Capture) -> None:
    """The error asks for a recipe."""
    assert "takes a recipe" in run_plan(capsys, code=2)
