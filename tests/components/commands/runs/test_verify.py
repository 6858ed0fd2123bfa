"""Every checkpoint of a run, read and judged."""

from pathlib import Path
from typing import Any

import pytest

from drawloom.components.commands.runs.verify import VerifyCommand
from drawloom.graph import UserError
from support.checkpoints import save_steps


def _verify(folder: Path) -> int:
    project: Any = None
    result = VerifyCommand(folder=folder, step=None).run(project)
    print(result.render("text"))
    return result.exit_code


def test_each_checkpoint_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The oldest comes first, with its contents; if all are whole, the exit code is 0."""
    save_steps(tmp_path, 9, 10)
    assert _verify(tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{tmp_path}/checkpoints/step-{step}" for step in (9, 10)]
    assert all(": valid, 3 files, " in line for line in lines)


def test_a_corrupt_checkpoint_is_named_with_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Older checkpoints are checked too, though a restarted run would not read them; the exit code is 1."""
    save_steps(tmp_path, 1, 2)
    path = tmp_path / "checkpoints/step-1/rank-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert _verify(tmp_path) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{tmp_path}/checkpoints/step-1: corrupt: rank-0.safetensors has ")
    assert "valid" in second


def test_a_folder_without_checkpoints_is_a_user_error(tmp_path: Path) -> None:
    """A folder without checkpoints exits with code 2, since nothing was verified."""
    with pytest.raises(UserError, match="holds no finished checkpoint") as caught:
        _verify(tmp_path)
    assert caught.value.exit_code == 2
