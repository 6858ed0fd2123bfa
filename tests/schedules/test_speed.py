"""Programs are built fast, for many ranks too."""

import time

import pytest

from drawloom.components.pipeline.program.lowering import lower
from drawloom.components.ports.program import flat
from support.schedules import schedule


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble_v", "dual_pipe_v"])
def test_a_rank_of_256_builds_its_program_in_time(name: str) -> None:
    """For 1024 microbatches, all sends and receives included, within 1.5 s of CPU time; a third of that is usual."""
    began = time.process_time()
    line = lower(schedule(name).program(256, 1024), 100)
    assert time.process_time() - began < 1.5
    assert len([*flat(line)]) >= 12000
