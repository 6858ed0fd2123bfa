"""The memory of a rank over a step."""

import attrs

from drawloom.components.planning.stage_costs import PassCost, StageCosts
from drawloom.components.planning.timeline import compute_peak_memory
from drawloom.components.ports.program import Action, Program


def program(*names: str) -> Program:
    """Return one rank's program of actions such as F0."""
    return Program.from_rank_programs([[Action(0, name[0], int(name[1:])) for name in names]])  # type: ignore[arg-type]


FORWARD = PassCost(peak_delta=12, kept_bytes={"x": 10})
WHOLE = {0: StageCosts({"F": FORWARD, "B": PassCost(peak_delta=3, last_delta=-10)}, 0)}


def test_a_peak_covers_all_microbatches_in_flight() -> None:
    """Gradients, present from the first backward pass on, count too."""
    peak = compute_peak_memory(program("F0", "F1", "B0", "F2", "B1", "B2"), 0, WHOLE, {0: 100})
    assert (peak.bytes, peak.action) == (100 + 20 + 3, "0B1")
    assert peak.kinds == {"x": 20, "temporary": 3, "gradients": 100}


def test_gradients_take_the_place_of_activations_in_the_first_backward_pass() -> None:
    """With one microbatch the peak is the greater of both, and not their sum."""
    assert compute_peak_memory(program("F0", "B0"), 0, WHOLE, {0: 8}).bytes == 13
    assert compute_peak_memory(program("F0", "B0"), 0, WHOLE, {0: 80}).bytes == 80


def test_gradients_that_are_kept_are_beside_all_activations() -> None:
    """They count from the step's first forward pass on, and once."""
    assert compute_peak_memory(program("F0", "B0"), 0, WHOLE, {0: 8}, {0: 6}).bytes == 10 + 3 + 6
    assert compute_peak_memory(program("F0", "B0"), 0, WHOLE, {0: 80}, {0: 80}).bytes == 80 + 13


def test_the_last_block_meets_the_gradients_of_all_others() -> None:
    """In the first backward pass the last block's temporary tensors count beside gradients."""
    costs = {0: StageCosts({"F": FORWARD, "B": PassCost(peak_delta=3, last_delta=-2)}, 0)}
    assert compute_peak_memory(program("F0", "B0"), 0, costs, {0: 4}).bytes == 13
    assert compute_peak_memory(program("F0", "B0"), 0, costs, {0: 80}).bytes == 88


def test_activations_wait_for_their_weight_gradients() -> None:
    """Less than before is kept after I, until W."""
    split = {
        "F": PassCost(peak_delta=10, kept_bytes={"x": 10}),
        "I": PassCost(peak_delta=1, kept_bytes={"y": 4}),
        "W": PassCost(peak_delta=2),
    }
    costs = {0: StageCosts(split, 0)}
    peak = compute_peak_memory(program("F0", "I0", "F1", "I1", "W0", "W1"), 0, costs, {0: 0})
    assert (peak.bytes, peak.action) == (4 + 10 + 1, "0I1")


def test_offloaded_activations_count_near_their_passes_only() -> None:
    """They are counted from F to the next action and from the action before B, not while they wait."""
    line = program("F0", "F1", "F2", "F3", "F4", "B0", "B1", "B2", "B3", "B4")
    resident, offloaded = (
        compute_peak_memory(attrs.evolve(line, offloaded=stages), 0, WHOLE, {0: 0})
        for stages in (frozenset[int](), frozenset({0}))
    )
    assert (resident.bytes, resident.action) == (50 + 3, "0B0")
    # During B0, microbatch 0 is back, 1 returns, and 4 leaves; 2 and 3 are away.
    assert (offloaded.bytes, offloaded.action) == (30 + 3, "0B0")
    assert offloaded.kinds == {"x": 30, "temporary": 3}
