"""`drawloom prove`, with a wrong loss."""

from pathlib import Path

import pytest

from drawloom.graph.cli.main import main
from support.blocks import ROOT, read_files


@pytest.mark.soak
def test_a_forgotten_sum_is_found_and_its_axis_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command names the axis and the phase, exits with 1, and writes a valid recipe; a named case is right."""
    (tmp_path / "short_first.py").write_text(read_files(ROOT / "docs/proving.md")["my_lab/short_first.py"], "utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(["prove", "short_first", "--import", "short_first.py"]) == 1
    printed = capsys.readouterr().out
    assert "is wrong with context = 2" in printed and "the sum of losses is" in printed
    assert "step 1, after [forward_backward]" in printed and "differs along context" in printed
    recipe = Path("prove-short_first.toml").read_text("utf-8")
    assert "context = 2" in recipe and "num_hidden_layers = 1" in recipe and "steps = 1" in recipe
    assert main(["check", "prove-short_first.toml", "--import", "short_first.py"]) == 0
    assert main(["prove", "short_first", "--import", "short_first.py", "--case", "tensor = 2"]) == 0
    printed = capsys.readouterr().out
    assert (
        "like one process (2): one process again; tensor = 2" in printed and "not tried: one process, killed" in printed
    )
    assert main(["prove", "loss.dft", "--case", "tensor"]) == 2
    assert "there is no case 'tensor'" in capsys.readouterr().err
