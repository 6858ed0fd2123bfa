"""How often to save."""

from unittest import mock

import pytest

from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.planning.checkpoint_interval import (
    CheckpointInterval,
    estimate_blocking_save_seconds,
    propose_checkpoint_interval,
)
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import plan
from support.plans import RECIPE


def test_no_other_number_of_steps_loses_less() -> None:
    """A job on four hosts fails four times as often as one on a single host, and saves twice as often."""
    intervals = {}
    for ranks in (1, 32):
        recipe = RECIPE.with_values({"mesh": {"data_replicate": ranks}, "batch": {"global_size": 64}})
        planned = plan(recipe, find_device_model("h100"), ranks)
        advised = propose_checkpoint_interval(
            Nodes.from_recipe(recipe), planned, host_mtbf_seconds=3.6e6, save_seconds=2.0
        )
        assert advised.between_failures == 3.6e6 / -(-ranks // 8)
        intervals[ranks] = advised.every * advised.step
        for other in (advised.every * 2, advised.every // 2, advised.every * 1.1):
            assert (
                CheckpointInterval(advised.node, round(other), 2.0, advised.between_failures, advised.step).lost
                > advised.lost
            )
        assert advised.toml == f"checkpoint.every = {advised.every}"
    assert intervals[1] == pytest.approx(2 * intervals[32], rel=0.01)


@pytest.mark.parametrize(("seconds", "hours"), [(3.6e6, "1,000 h;"), (1.33e7, "3,690 h;"), (4440.0, "1.23 h;")])
def test_hours_are_written_out(seconds: float, hours: str) -> None:
    """With three digits, and never as a power of ten."""
    assert f"a failure is expected every {hours}" in str(CheckpointInterval("checkpoint", 9, 2.0, seconds, 0.1))


def test_a_save_takes_longer_without_staging() -> None:
    """The disk is slower than the memory of a host; moments and weights count, gradients do not."""
    planned = plan(RECIPE, find_device_model("cpu"))
    kept = planned.memory[0].persistent
    size = kept["parameters"] + kept["optimizer_state"]
    assert estimate_blocking_save_seconds(Nodes.from_recipe(RECIPE), planned) == pytest.approx(size / 10e9)
    with mock.patch.object(Nodes, "find_nodes", return_value=[]):
        assert estimate_blocking_save_seconds(Nodes.from_recipe(RECIPE), planned) == pytest.approx(size / 2e9)
