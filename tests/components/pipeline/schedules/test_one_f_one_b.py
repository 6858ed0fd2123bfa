"""1F1B."""

from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.pipeline.schedules.one_f_one_b import OneFOneB
from drawloom.components.ports.pipeline import Action


def live(actions: list[Action]) -> int:
    """The most microbatches that are forward and not yet backward at once."""
    held = peak = 0
    for action in actions:
        held += 1 if action.work == "F" else -1
        peak = max(peak, held)
    return peak


def test_one_rank_is_the_plain_loop() -> None:
    """One rank goes backward through each microbatch as soon as it went forward."""
    assert [str(action) for action in OneFOneB().program(1, 2)[0]] == ["0F0", "0B0", "0F1", "0B1"]


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 32))
def test_every_microbatch_goes_forward_then_backward_once(ranks: int, microbatches: int) -> None:
    """Each rank runs its stage once forward and once backward for each microbatch, in that order and in their order."""
    for rank, actions in enumerate(OneFOneB().program(ranks, microbatches)):
        for work in "FB":
            assert [a.microbatch for a in actions if a.work == work] == list(range(microbatches))
        assert {action.stage for action in actions} == {rank}
        places = {str(action): place for place, action in enumerate(actions)}
        assert all(places[f"{rank}F{number}"] < places[f"{rank}B{number}"] for number in range(microbatches))


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 32))
def test_rank_r_holds_at_most_p_minus_r_microbatches(ranks: int, microbatches: int) -> None:
    """The peak of live microbatches is p - r, or all of them if they are fewer."""
    peaks = [live(actions) for actions in OneFOneB().program(ranks, microbatches)]
    assert peaks == [min(ranks - rank, microbatches) for rank in range(ranks)]
