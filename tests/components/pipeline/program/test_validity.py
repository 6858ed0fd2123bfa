"""What is wrong with programs."""

import pytest

from drawloom.components.pipeline.program.notation import read_program
from drawloom.components.pipeline.program.validity import faults
from drawloom.components.ports.program import Action, Program

FINE = ["0: 0F0 0F1 0B0 0I1 0W1\n1: 1F0 1B0 1F1 1B1\n", "0: 0F0 0F1\n1: 1F0 1F1\n", "0: 0F0 1F0 1B0 0B0\n"]


@pytest.mark.parametrize("text", FINE)
def test_a_program_that_is_fine_has_no_fault(text: str) -> None:
    """Whole and split backwards, inference, several stages on a rank."""
    assert faults(read_program(text)) == []


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
        ("0: 0F0 0B0 0F1 0B1\n1: 1F1 1B1 1F0 1B0\n", "no rank can go on: rank 0 waits to do 0B0"),
    ],
)
def test_what_is_wrong_is_said(text: str, fault: str) -> None:
    """Work that is missing, doubled or out of order, and programs that never end, some of which torch takes."""
    found = faults(read_program(text))
    assert found and found[0].startswith(fault)


def test_work_stands_on_the_rank_that_owns_its_stage() -> None:
    """A stage's work on another rank is a fault."""
    program = Program.of([[Action(0, "F", 0)], [Action(1, "F", 0)]], owners=[0, 0])
    assert "1F0 is on rank 1, but its stage belongs to rank 0" in faults(program)
    assert "5F0 on rank 0: there are stages 0 to 0" in faults(Program.of([[Action(5, "F", 0)]], owners=[0]))
