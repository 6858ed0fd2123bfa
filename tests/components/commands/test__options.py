"""Options with impossible values."""

import errno
import os
from pathlib import Path

import pytest

from drawloom.components.commands._options import check_writable_file, convert_write_errors
from drawloom.graph import UserError
from drawloom.graph.cli.main import main


@pytest.mark.parametrize("text", ["0", "-7", "nan", "2.5", "", "x"])
def test_meaningless_numbers_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command with a count names the option and its value, before any run is opened."""
    for command in (
        ["embed", "runs/none", "a.txt", "--to", "e", "--context"],
        ["embed", "runs/none", "a.txt", "--to", "e", "--rows"],
        ["lm-eval", "runs/none", "--tasks", "x", "--context"],
        ["lm-eval", "runs/none", "--tasks", "x", "--limit"],
        ["reference-logps", "dpo", "--to", "e", "--pairs"],
        ["verify-resume", "first_run", "--ranks"],
        ["generate", "runs/none", "--prompt", "a", "--tokens"],
    ):
        assert main([*command[:-1], f"{command[-1]}={text}"]) == 2
        assert f"argument {command[-1]}: {text!r} is not a positive integer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "text"),
    [("--steps=-1", "an integer of 0 or more"), ("--tolerance=nan", "a number above 0"), ("--tolerance=0", "a number")],
)
def test_a_measurement_of_precision_refuses_numbers(option: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A number without a meaning is refused before anything is measured."""
    assert main(["precision", "first_run", option]) == 2
    assert f"is not {text}" in capsys.readouterr().err


def test_a_measurement_of_precision_keeps_existing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An existing overlay is not overwritten, and nothing is measured."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text("mine")
    assert main(["precision", "first_run", "--to", "mine.toml"]) == 2
    assert "--to: mine.toml exists; give the name of a new file" in capsys.readouterr().err
    assert Path("mine.toml").read_text() == "mine"


@pytest.mark.parametrize("name", ["missing/e.json", "/proc/e.json", "file/e.json", "."])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing or unwritable folder, a file in place of the folder, and a folder in place of the file are refused."""
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    commands = ["embed runs/none a.txt", "reference-logps dpo", "lm-eval r --tasks x", "plan first_run", "report r"]
    commands.append("precision first_run")
    for command in map(str.split, commands):
        assert main([*command, "--to", name]) == 2
        assert "argument --to: " in (said := capsys.readouterr().err) and "; write " in said
    assert check_writable_file(Path("fine.json")) is None and not Path("fine.json").exists()


def test_a_full_disk_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the file and the remedy; earlier results are still printed."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    search = ["plan", "first_run", "--search", "--ranks", "2", "--device", "h100", "--to", "best.toml"]
    assert main(search) == 2
    said = capsys.readouterr()
    assert "mesh.data_shard = 2" in said.out
    assert said.err == "best.toml can't be written: No space left on device; write another file with --to\n"
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match=r"^e can't be written: Permission denied; "), convert_write_errors(Path("e")):
        raise PermissionError(errno.EACCES, "Permission denied")
