"""The metric alone, and in the contract of its port; `build` and `check_port` are fixtures that drawloom brings."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from drawloom_perplexity.metric import Perplexity

from drawloom.components.ports.run import Metric, Step


def test_it_is_e_to_the_loss(build: Callable[..., Any]) -> None:
    """A loss of ln 7 is as undecided as a die with seven sides."""
    values = build(Perplexity).compute({}, Step(1, 1, outputs={"loss": math.log(7.0)}))
    assert values == pytest.approx({"perplexity": 7.0})


def test_it_is_bounded(build: Callable[..., Any]) -> None:
    """What no picture could show is cut off."""
    assert build(Perplexity, most=100.0).compute({}, Step(1, 1, outputs={"loss": 1e9})) == {"perplexity": 100.0}


def test_it_keeps_the_contract_of_metrics(check_port: Callable[..., None]) -> None:
    """It does what drawloom promises of every metric."""
    check_port(Perplexity, Metric)
