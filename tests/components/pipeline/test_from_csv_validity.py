"""Violations of the rules of programs."""

import pytest

from drawloom.components.pipeline.from_csv import find_violations
from drawloom.components.ports.program import Action, Program
from support.schedules import parse_program

VALID = ["0: 0F0 0F1 0B0 0I1 0W1\n1: 1F0 1B0 1F1 1B1\n", "0: 0F0 0F1\n1: 1F0 1F1\n", "0: 0F0 1F0 1B0 0B0\n"]


@pytest.mark.parametrize("text", VALID)
def test_valid_programs_have_no_violation(text: str) -> None:
    """Whole and split backwards, inference, and several stages on a rank are valid."""
    assert find_violations(parse_program(text)) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("0: 0F0 0F0 0B0\n", "stage 0 does FFB for microbatch 0, not FB or FIW"),
        ("0: 0F0 0B0 0B0\n", "stage 0 does FBB for microbatch 0, not FB or FIW"),
        ("0: 0F0 0F1 0B0\n", "stage 0 does F for microbatch 1, not FB or FIW"),
        ("0: 0F1 0B1\n", "stage 0 does nothing for microbatch 0, not FB or FIW"),
        ("0: 0B0 0F0\n", "stage 0 does BF for microbatch 0, not FB or FIW"),
        ("0: 0F0 0W0 0I0\n", "stage 0 does FWI for microbatch 0, not FB or FIW"),
        ("0: 0F0 0I0\n", "stage 0 does FI for microbatch 0, not FB or FIW"),
        ("0: 0F0 0F1\n1: 1F0\n", "stage 1 does nothing for microbatch 1, not F"),
        ("0: 0F0 0B0 0F1 0B1\n1: 1F1 1B1 1F0 1B0\n", "deadlock: rank 0 waits to do 0B0"),
    ],
)
def test_violations_are_reported(text: str, fault: str) -> None:
    """Missing, doubled and misordered actions, and deadlocks, some accepted by torch, are reported."""
    reported = find_violations(parse_program(text))
    assert reported and reported[0].startswith(fault)


def test_actions_on_the_wrong_rank_are_reported() -> None:
    """An action of a stage on another rank is a violation."""
    program = Program.from_rank_programs([[Action(0, "F", 0)], [Action(1, "F", 0)]], stage_to_rank=[0, 0])
    assert "1F0 is on rank 1, but its stage belongs to rank 0" in find_violations(program)
    assert "5F0 on rank 0: there are stages 0 to 0" in find_violations(
        Program.from_rank_programs([[Action(5, "F", 0)]], stage_to_rank=[0])
    )
