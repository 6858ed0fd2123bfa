"""`drawloom prove`, with a wrong loss."""

import re
from pathlib import Path

import pytest

from drawloom.graph.cli.main import main
from drawloom.testing import BrokenContractError, prove

PAGE = (Path(__file__).parents[3] / "docs/proving.md").read_text("utf-8")


def read_example(name: str) -> str:
    """Return a file in the page."""
    match = re.search(rf'title="my_lab/{name}.py"\n(.*?)```', PAGE, re.DOTALL)
    assert match is not None, name
    return match[1]


@pytest.fixture
def short_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the page's wrong loss, and return its name."""
    (tmp_path / "short_first.py").write_text(read_example("short_first"), "utf-8")
    monkeypatch.chdir(tmp_path)
    return "short_first"


def test_a_forgotten_sum_is_found_and_its_axis_named(short_first: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command names the axis and the phase, and exits with 1; the written recipe is valid."""
    assert main(["prove", short_first, "--import", "short_first.py"]) == 1
    printed = capsys.readouterr().out
    assert "is wrong with context = 2" in printed and "the sum of losses is" in printed
    assert "step 1, after [forward_backward]" in printed and "differs along context" in printed
    recipe = Path("prove-short_first.toml").read_text("utf-8")
    assert "context = 2" in recipe and "num_hidden_layers = 1" in recipe and "steps = 1" in recipe
    assert main(["check", "prove-short_first.toml", "--import", "short_first.py"]) == 0


def test_a_broken_contract_fails_a_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any run, a component is put to its contracts, and `prove` raises like a failed contract."""
    text = read_example("short_first").replace("batch.weights.double().sum()", "batch.weights.double().mean()")
    (tmp_path / "mean_loss.py").write_text(text, "utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BrokenContractError, match="mean_loss breaks a contract: Loss: Loss and weight are scalars"):
        prove("mean_loss", imports="mean_loss.py")
