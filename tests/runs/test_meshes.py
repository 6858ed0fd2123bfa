"""The same run on one process and on several."""

from pathlib import Path
from typing import Any

import pytest

from support.runs import drawloom, rows, series, take_back, write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a corpus, the tiny recipe, and its run on one process."""
    folder = tmp_path_factory.mktemp("meshes")
    write_corpus(folder)
    assert drawloom(folder, "run", "tiny.toml", "run.name=one")[0].code == 0
    return folder


def assert_same(run: Path, other: Path) -> None:
    """Assert that losses and gradient norms of every step are equal to 1e-6 relative."""
    ours, theirs = (series(side, "loss", "grad_norm", "validation_loss", "tokens") for side in (run, other))
    assert len(ours) == len(theirs) == 10
    for our_values, their_values in zip(ours, theirs, strict=True):
        assert [value or 0 for value in our_values] == pytest.approx([value or 0 for value in their_values], rel=1e-6)


@pytest.mark.parametrize("norm", ["exact", "device"])
def test_two_processes_have_the_losses_of_one(folder: Path, norm: str) -> None:
    """Two data-parallel processes have the losses and tokens of one, also if the host learns them a step later."""
    words = ("batch.micro_size=2", f"sync_gradients.norm={norm}")
    codes = drawloom(folder, "run", "tiny.toml", f"run.name=two_{norm}", *words, ranks=2)
    assert [outcome.code for outcome in codes] == [0, 0]
    assert_same(folder / "runs/one", folder / f"runs/two_{norm}")


@pytest.mark.parametrize("size", [1, 2])
def test_losses_do_not_depend_on_the_microbatch_size(folder: Path, size: int) -> None:
    """Gradients are sums over tokens, however rows are divided into microbatches."""
    assert drawloom(folder, "run", "tiny.toml", f"run.name=micro{size}", f"batch.micro_size={size}")[0].code == 0
    assert_same(folder / "runs/one", folder / f"runs/micro{size}")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_resumes_on_another_number_of_processes(folder: Path, before: int, after: int) -> None:
    """A checkpoint resumes on another number of processes with the same losses."""
    name = f"run.name=from{before}to{after}"
    common = ["run", "tiny.toml", name, "batch.micro_size=2", "checkpoint.every=5"]
    drawloom(folder, *common, ranks=before)
    take_back(folder / "runs" / name.removeprefix("run.name="), 5)
    codes = drawloom(folder, *common, ranks=after)
    assert {outcome.code for outcome in codes} == {0}
    assert_same(folder / "runs/one", folder / "runs" / name.removeprefix("run.name="))


def test_a_mesh_that_does_not_fit_names_the_command_to_launch_it(folder: Path) -> None:
    """One process for a mesh of two ends before training, with the command that launches two."""
    outcome = drawloom(folder, "run", "tiny.toml", "run.name=wrong", "mesh.data_replicate=2", "batch.micro_size=2")[0]
    assert (
        outcome.code == 2 and "drawloom launch --nproc-per-node 2" in outcome.text and "Traceback" not in outcome.text
    )


@pytest.mark.parametrize("norm", ["exact", "device"])
def test_a_diverged_step_is_skipped_on_all_ranks(folder: Path, norm: str) -> None:
    """Steps with a non-finite loss are tracked as skipped and not applied, and a run that ends with them fails."""
    diverge = ["optimizer.lr=1e30", "clip.max_norm=1e30", "trainer.steps=4", "trainer.on_finish=[]"]
    name, own = f"diverged_{norm}", (f"sync_gradients.norm={norm}", "batch.micro_size=2")
    outcomes = drawloom(folder, "run", "tiny.toml", f"run.name={name}", *own, *diverge, ranks=2)
    written: list[dict[str, Any]] = rows(folder / "runs" / name)
    assert [outcome.code for outcome in outcomes] == [1, 1] and "skipped" in outcomes[0].text
    assert [row.get("skipped", False) for row in written] == [False, True, True, True]
    assert written[1]["loss"] is None
