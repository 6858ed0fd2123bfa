"""Starting a run again: with more steps, with another recipe, or from where its folder was moved to."""

import json
from pathlib import Path

from support.runs import drawloom


def read_exported_step(run: Path) -> int:
    """Return the step number that an export records."""
    return int(json.loads((run / "export" / "trainer_state.json").read_text())["global_step"])


def test_a_continued_run_writes_its_results_again(folder: Path) -> None:
    """After more steps, export and sample are written again and equal an uninterrupted run's."""
    run, straight = folder / "runs/tiny", folder / "runs/straight"
    constant = ["lr.phases=[{ to = 1.0 }]", "lr.start=1.0"]  # or the rate of each step depends on the number of steps
    assert drawloom(folder, "run", "tiny.toml", *constant, "trainer.steps=2")[0].code == 0
    assert read_exported_step(run) == 2
    early = (run / "export/model.safetensors").read_bytes(), (run / "sample.txt").read_bytes()
    again = drawloom(folder, "run", "tiny.toml", *constant, "trainer.steps=4")[0]
    assert again.code == 0, again.text
    assert drawloom(folder, "run", "tiny.toml", *constant, "trainer.steps=4", "run.name=straight")[0].code == 0
    late = (run / "export/model.safetensors").read_bytes(), (run / "sample.txt").read_bytes()
    assert read_exported_step(run) == 4 and all(old != new for old, new in zip(early, late, strict=True))
    assert late[0] == (straight / "export/model.safetensors").read_bytes()
    assert late[1] == (straight / "sample.txt").read_bytes()


def test_a_failed_resume_leaves_the_recipe_of_the_run(folder: Path) -> None:
    """The original command still works after a change was refused or failed while restoring the state."""
    command, lock = ["run", "tiny.toml", "trainer.steps=4"], folder / "runs/tiny/recipe.lock.toml"
    assert drawloom(folder, *command)[0].code == 0
    before = lock.read_bytes()
    refused = drawloom(folder, *command, "model.hidden_size=32")[0]
    failed = drawloom(folder, *command, "model.hidden_size=32", "--accept-changes")[0]
    assert refused.code == 2 and "the saved state does not fit incompatible changes" in refused.text
    assert failed.code != 0 and "Traceback" not in failed.text, failed.text
    assert "v_proj.weight is (8, 16) in the checkpoint, and (8, 32) here" in failed.text
    longer = drawloom(folder, "run", "tiny.toml", "trainer.steps=5")[0]
    assert "steps: 4 -> 5 (changes_training: the values of [lr] at each step follow from" in longer.text, longer.text
    assert lock.read_bytes() == before
    again = drawloom(folder, *command)[0]
    assert again.code == 0 and "nothing left to do" in again.text, again.text


def test_a_moved_run_folder_resumes_in_place(folder: Path) -> None:
    """A run folder that was moved is resumed in place from its checkpoint; with another name its recipe starts anew."""
    assert drawloom(folder, "run", "tiny.toml", "trainer.steps=4")[0].code == 0
    (folder / "moved").mkdir()
    (folder / "runs/tiny").rename(folder / "moved/kept")
    again = drawloom(folder, "run", "moved/kept", "evaluate.every=2")[0]
    assert again.code == 0 and "nothing left to do" in again.text, again.text
    assert list_runs(folder / "runs") == []
    assert drawloom(folder, "run", "moved/kept", "run.name=other", "trainer.steps=1")[0].code == 0
    assert list_runs(folder / "runs") == ["other"] and list_runs(folder / "moved") == ["kept"]


def list_runs(folder: Path) -> list[str]:
    """List the runs in a folder, without its token cache."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".tokens")


def test_a_run_whose_last_steps_were_skipped_fails(folder: Path) -> None:
    """A learning rate that ruins the weights ends with an error that says so, after the sample and the summary."""
    [ended] = drawloom(folder, "run", "tiny.toml", "optimizer.lr=1e6")
    assert ended.code == 1 and "Traceback" not in ended.text, ended.text
    assert "a sample:" in ended.text and "trained steps 1 to 10" in ended.text
    last = ended.text.splitlines()[-1]
    assert last.startswith("the last ") and "steps were skipped, at last step 10: the norm of the gradients" in last
    assert "lower the learning rate" in last
