"""The metric's values and its port's contract, tested with drawloom's fixtures."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from drawloom_perplexity.metric import Perplexity

from drawloom.ports import Metric, Step


def test_perplexity_is_e_to_the_loss(drawloom_build: Callable[..., Any]) -> None:
    """A loss of ln 7 has perplexity 7, like a die with seven sides."""
    values = drawloom_build(Perplexity).compute({}, Step(1, 1, state={"loss": math.log(7.0)}))
    assert values == pytest.approx({"perplexity": 7.0})


def test_perplexity_is_bounded(drawloom_build: Callable[..., Any]) -> None:
    """Values above `maximum` are cut off."""
    assert drawloom_build(Perplexity, maximum=100.0).compute({}, Step(1, 1, state={"loss": 1e9})) == {
        "perplexity": 100.0
    }


def test_metric_keeps_the_contract_of_its_port(drawloom_check_port: Callable[..., None]) -> None:
    """The metric behaves as drawloom requires of every metric."""
    drawloom_check_port(Perplexity, Metric)
