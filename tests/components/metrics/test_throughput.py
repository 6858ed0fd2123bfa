"""How fast the run learns."""

import pytest
import torch

from drawloom.components.metrics.throughput import Throughput
from drawloom.components.ports.run import Interval, Step
from support.metrics import measure
from support.steps import LateState


def test_tokens_per_second_exclude_the_interval_s_excluded_spans() -> None:
    """100 tokens in 12 seconds, with 2 seconds for evaluation, are 10 a second; without an interval none are known."""
    step = Step(1, 9, {"tokens": 100.0}, interval=Interval(8.0, 20.0, [(9.0, 11.0)]))
    values = measure(Throughput(), step)
    assert values == {"tokens": 100, "tokens_per_second": 10.0}
    assert type(values["tokens"]) is int
    assert measure(Throughput(), Step(1, 9, {"tokens": 1.0}))["tokens_per_second"] is None


def test_tokens_add_up_over_a_resumed_run() -> None:
    """Counting continues from the state saved by another process."""
    first, second = Throughput(), Throughput()
    measure(first, Step(1, 9, state={"tokens": 100.0}))
    measure(first, Step(2, 9, state={"tokens": 30.0}))
    second.load_state_dict(first.state_dict())
    assert measure(second, Step(3, 9, state={"tokens": 7.0}))["tokens"] == 137


def test_a_clock_that_stands_still_raises_no_error() -> None:
    """A step of zero seconds has a speed, however large."""
    step = Step(1, 9, {"tokens": 1.0}, interval=Interval(1.0, 1.0))
    assert measure(Throughput(), step)["tokens_per_second"] == pytest.approx(1e9)


def test_token_counts_on_a_device_are_read_late() -> None:
    """Measuring does not wait for them; a state saved before the step's values counts them too."""
    step, throughput = Step(1, 9, LateState({"tokens": torch.tensor(100.0)})), Throughput()
    throughput.measure_on_rank(step)
    assert not step.state.is_on_host
    assert throughput.state_dict() == {"tokens": 100} and step.state.is_on_host
