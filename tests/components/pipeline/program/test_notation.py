"""Programs as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.pipeline.program.notation import parse_action
from drawloom.components.ports.program import Action, Overlap
from support.schedules import NAMES, format_program, parse_program, schedule, texts

ACTIONS = st.builds(Action, st.integers(0, 99), st.sampled_from("FBIW"), st.integers(0, 99))


@given(item=st.one_of(ACTIONS, st.builds(Overlap, st.tuples(ACTIONS, ACTIONS))))
def test_labels_are_read_as_they_are_written(item: Action | Overlap) -> None:
    """An action or overlap comes back from its label."""
    assert parse_action(str(item)) == item


@given(name=st.sampled_from(NAMES), ranks=st.integers(1, 4), microbatches=st.integers(1, 9))
def test_programs_are_read_as_they_are_written(name: str, ranks: int, microbatches: int) -> None:
    """A program comes back from its text."""
    program = schedule(name).program(ranks, microbatches)
    back = parse_program(format_program(program))
    assert (back.stage_to_rank, back.microbatches) == (program.stage_to_rank, microbatches)
    assert [texts(back.rank_program(rank)) for rank in range(ranks)] == [
        texts(program.rank_program(rank)) for rank in range(ranks)
    ]


@pytest.mark.parametrize("text", ["", "F7", "3F", "3X7", "3F7|", "-1F0", "3F7 ", "3f7"])
def test_other_texts_are_not_actions(text: str) -> None:
    """The error shows the text and an example of an action."""
    with pytest.raises(ValueError, match="is not an action; write such as 3F7"):
        parse_action(text)
