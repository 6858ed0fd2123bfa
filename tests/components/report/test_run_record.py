"""The contents of a run folder."""

from pathlib import Path

import pytest

from drawloom.components.report.run_record import (
    Drawings,
    check_is_run,
    list_differing_settings,
    make_unique_run_names,
    parse_recipe_settings,
    read_run_record,
)
from drawloom.graph import UserError


def test_recipes_are_compared_key_by_key() -> None:
    """Only differences are listed, without runs' names; an unreadable recipe has no settings."""
    one = '[clip]\nuse = "gradients.clip_norm"\nmax_norm = 1.0\n[run]\nuse = "run.job"\nname = "a"\n'
    other = '[run]\nuse = "run.job"\nname = "b"\n'
    known, rest, unread = map(parse_recipe_settings, (one, other, "= no TOML"))
    assert known == {"clip.use": '"gradients.clip_norm"', "clip.max_norm": "1.0", "run.use": '"run.job"'}
    assert list_differing_settings([known, rest]) == ["clip.use", "clip.max_norm"]
    assert list_differing_settings([rest, rest]) == []
    assert list_differing_settings([rest, unread]) == ["run.use"]


def test_two_runs_of_one_name_are_called_by_their_paths(tmp_path: Path) -> None:
    """Folders of the same name are called by their paths, others by their names."""
    folders = [tmp_path / "a/mine", tmp_path / "b/mine", tmp_path / "other"]
    assert make_unique_run_names(folders) == [str(folders[0]), str(folders[1]), "other"]


def test_a_folder_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    """The message has a remedy."""
    with pytest.raises(UserError, match="is not a run folder; give one, such as"):
        check_is_run(tmp_path)


def test_a_folder_with_nothing_but_metrics_is_a_run(tmp_path: Path) -> None:
    """All else may be missing."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n', "utf-8")
    check_is_run(tmp_path)
    run = read_run_record(tmp_path, "mine", Drawings())
    assert run.metrics.last_value("loss") == 2.5 and not run.log.events and not run.checkpoints and not run.recipe
