"""Starting a run again: with more steps, with another recipe, or from where its folder was moved to."""

import json
from pathlib import Path

from support.runs import drawloom


def exported_step(run: Path) -> int:
    """The step that an export records."""
    return int(json.loads((run / "export" / "trainer_state.json").read_text())["global_step"])


def test_results_of_a_continued_run_are_of_its_last_step(place: Path) -> None:
    """After more steps, export and sample are those of the new last step, as in a run that was not interrupted."""
    run, straight = place / "runs/tiny", place / "runs/straight"
    constant = ["lr.phases=[{ to = 1.0 }]", "lr.start=1.0"]  # or the rate of each step depends on the number of steps
    assert drawloom(place, "run", "tiny.toml", *constant, "trainer.steps=2")[0].code == 0
    assert exported_step(run) == 2
    early = (run / "export/model.safetensors").read_bytes(), (run / "sample.txt").read_bytes()
    again = drawloom(place, "run", "tiny.toml", *constant, "trainer.steps=4")[0]
    assert again.code == 0, again.text
    assert drawloom(place, "run", "tiny.toml", *constant, "trainer.steps=4", "run.name=straight")[0].code == 0
    late = (run / "export/model.safetensors").read_bytes(), (run / "sample.txt").read_bytes()
    assert exported_step(run) == 4 and all(old != new for old, new in zip(early, late, strict=True))
    assert late[0] == (straight / "export/model.safetensors").read_bytes()
    assert late[1] == (straight / "sample.txt").read_bytes()


def test_a_failed_resume_leaves_the_recipe_of_the_run(place: Path) -> None:
    """A change that is refused, or that fails when the state is restored, leaves the original command working."""
    command, lock = ["run", "tiny.toml", "trainer.steps=4"], place / "runs/tiny/recipe.lock.toml"
    assert drawloom(place, *command)[0].code == 0
    before = lock.read_bytes()
    refused = drawloom(place, *command, "model.hidden_size=32")[0]
    failed = drawloom(place, *command, "model.hidden_size=32", "--accept-changes")[0]
    assert refused.code == 2 and "the saved state does not fit incompatible changes" in refused.text
    assert failed.code != 0 and "Traceback" not in failed.text, failed.text
    assert "v_proj.weight is (8, 16) in the checkpoint, and (8, 32) here" in failed.text
    longer = drawloom(place, "run", "tiny.toml", "trainer.steps=5")[0]
    assert "steps: 4 -> 5 (changes_training: the values of [lr] at each step follow from" in longer.text, longer.text
    assert lock.read_bytes() == before
    again = drawloom(place, *command)[0]
    assert again.code == 0 and "nothing left to do" in again.text, again.text


def test_a_moved_run_folder_resumes_where_it_is(place: Path) -> None:
    """A run folder that was moved is resumed in place from its checkpoint; with another name its recipe starts anew."""
    assert drawloom(place, "run", "tiny.toml", "trainer.steps=4")[0].code == 0
    (place / "moved").mkdir()
    (place / "runs/tiny").rename(place / "moved/kept")
    again = drawloom(place, "run", "moved/kept", "evaluate.every=2")[0]
    assert again.code == 0 and "nothing left to do" in again.text, again.text
    assert runs_in(place / "runs") == []
    assert drawloom(place, "run", "moved/kept", "run.name=other", "trainer.steps=1")[0].code == 0
    assert runs_in(place / "runs") == ["other"] and runs_in(place / "moved") == ["kept"]


def runs_in(folder: Path) -> list[str]:
    """The runs in a folder, beside which the tokens of their corpora are kept."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".tokens")


def test_a_run_whose_last_steps_were_skipped_fails(place: Path) -> None:
    """A learning rate that ruins the weights ends with an error that says so, after the sample and the summary."""
    [ended] = drawloom(place, "run", "tiny.toml", "optimizer.lr=1e6")
    assert ended.code == 1 and "Traceback" not in ended.text, ended.text
    assert "a sample:" in ended.text and "trained steps 1 to 10" in ended.text
    last = ended.text.splitlines()[-1]
    assert last.startswith("the last ") and "steps were skipped, at last step 10: the norm of the gradients" in last
    assert "lower the learning rate" in last
