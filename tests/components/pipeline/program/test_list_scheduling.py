"""List scheduling."""

from itertools import pairwise

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.pipeline.from_csv import find_violations
from drawloom.components.pipeline.program.builders import assign_stages_in_loop, assign_stages_in_vee
from drawloom.components.pipeline.program.list_scheduling import (
    FORWARDS_FIRST,
    PriorityPolicy,
    SchedulingTask,
    build_list_schedule,
    compute_makespan,
    compute_peak_activations,
)
from drawloom.components.pipeline.program.timing import Costs, CostTable, compute_timing
from drawloom.components.pipeline.simulation.simulator import simulate
from support.schedules import schedule, texts

OFFSETS = st.floats(-3, 3)
POLICIES = st.builds(
    PriorityPolicy,
    down=st.tuples(OFFSETS, OFFSETS),
    up=st.tuples(OFFSETS, OFFSETS),
    turn=OFFSETS,
    pace=st.floats(0, 2),
    spared=st.tuples(st.floats(-0.2, 1), st.floats(-0.2, 1)),
    patience=st.floats(0, 1),
)


@st.composite
def tasks(draw: st.DrawFn) -> SchedulingTask:
    """Tasks on loops and Vs, with any costs and sizes, of pending ones too, and a limit of one microbatch or more."""
    ranks = draw(st.integers(1, 5))
    placement = draw(
        st.sampled_from([assign_stages_in_vee(ranks), assign_stages_in_loop(ranks), assign_stages_in_loop(ranks, 3)])
    )
    count = len(placement)
    factors = draw(st.lists(st.floats(0.2, 2), min_size=count, max_size=count))
    sizes = tuple(draw(st.lists(st.floats(0.2, 2), min_size=count, max_size=count)))
    forward, inputs, weights = (draw(st.floats(0.2, 2)) for _ in range(3))
    lengths = np.outer(factors, [forward, inputs + weights, inputs, weights])
    costs = CostTable(comm=draw(st.floats(0, 1)), lengths=lengths)
    pending = tuple(draw(st.lists(st.floats(0.1, 3), min_size=count, max_size=count)))
    task = SchedulingTask(
        placement, draw(st.integers(1, 10)), costs, sizes, 1.0, draw(st.sampled_from([sizes, pending]))
    )
    return attrs.evolve(task, limit=task.microbatch_peak_memory * draw(st.floats(1, 4)))


@given(task=tasks(), policy=POLICIES)
def test_any_policy_gives_a_valid_program_within_memory(task: SchedulingTask, policy: PriorityPolicy) -> None:
    """For any task that fits and any policy, the program finishes, keeps the limit, and takes the reported time."""
    program = build_list_schedule(task, policy)
    assert find_violations(program) == []
    assert max(compute_peak_activations(program, task.activations, task.pending)) <= task.limit * (1 + 1e-6)
    assert (
        abs(compute_makespan(task, policy) - compute_timing(program, task.costs).makespan)
        < 1e-6 * task.busiest_rank_microbatch_time
    )


def test_peaks_equal_those_of_the_simulation() -> None:
    """With sizes of 1, the activation peak is the simulated number of stage-microbatches until weight gradients."""
    for name in ("zero_bubble_v", "dual_pipe_v", "one_f_one_b"):
        program = schedule(name).program(4, 9)
        assert (
            compute_peak_activations(program, [1.0] * program.stages)
            == simulate(program, Costs()).peak_microbatches_in_flight
        )


def test_a_rank_waits_for_an_action_that_is_ready_soon() -> None:
    """A rank waits instead of running a weight gradient if another action is ready within the policy's patience."""
    task = SchedulingTask((0, 1), 3, Costs(1, 1, 2.5, comm=0.3), (1.0, 1.0), 4.0)
    eager, patient = (build_list_schedule(task, PriorityPolicy(turn=-4, patience=share)) for share in (0.0, 0.5))
    # The next input gradient is ready after a pause of 1, less than half of 2.5.
    assert texts(eager.rank_program(0)) == ["0F0", "0F1", "0F2", "0I0", "0W0", "0I1", "0I2", "0W1", "0W2"]
    assert texts(patient.rank_program(0)) == ["0F0", "0F1", "0F2", "0I0", "0I1", "0I2", "0W0", "0W1", "0W2"]


def test_no_rank_idles_with_pending_weight_gradients() -> None:
    """Without latency and with equal costs a rank waits only if it has no pending weight gradient."""
    run = simulate(
        build_list_schedule(SchedulingTask(assign_stages_in_vee(4), 12, Costs(), (1.0,) * 8, 8.0), FORWARDS_FIRST),
        Costs(),
    )
    for rank in range(4):
        bars = list(run.iterate_bars(rank))
        for number, (one, other) in enumerate(pairwise(bars), 1):
            works = "".join(bar.action.op for bar in bars[:number])
            assert other.start == one.end or works.count("I") == works.count("W")
