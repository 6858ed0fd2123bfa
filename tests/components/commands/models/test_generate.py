"""The command `generate`."""

import pytest

from drawloom.graph.cli.main import main


@pytest.mark.parametrize(
    ("option", "value"),
    [("--top-k", "0"), ("--tokens", "-3"), ("--tokens", "0"), ("--context", "x"), ("--temperature", "-1")]
    + [("--temperature", value) for value in ("nan", "inf", "warm")],
)
def test_impossible_sampling_is_refused(capsys: pytest.CaptureFixture[str], option: str, value: str) -> None:
    """The option and its value are named, before any run is opened."""
    assert main(["generate", "runs/none", "--prompt", "a", f"{option}={value}"]) == 2
    assert f"error: argument {option}: {value!r} is not a" in capsys.readouterr().err
