"""
Component tests: build one component, fake a port, check a component against its port's contract, prove it on meshes.

The pytest fixtures are `drawloom_build`, `drawloom_fake` and `drawloom_check_port`; `drawloom_opened` opens a component
until the test ends. `prove` is `drawloom.testing.prove`, whose processes are shared by all tests.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Optional

from drawloom.graph.testing import BrokenContractError, Call, build, check_port, expect, fake

if TYPE_CHECKING:
    from drawloom.components.proving.prover import Prover

__all__ = ["BrokenContractError", "Call", "build", "check_port", "expect", "fake", "prove"]


def prove(
    subject: str | type,
    *words: str,
    imports: str | Sequence[str] = (),
    nodes: Sequence[str] = (),
    budget: float | None = 120.0,
    prover: Optional["Prover"] = None,
) -> None:
    """
    Prove a component, by class or name, or a recipe, like `drawloom prove`.

    `words` set values, such as "optimizer.lr=0.1". No case begins after `budget` seconds; None tries all. Proofs with
    one open `prover` share its processes. Raises BrokenContractError with the first difference.
    """
    from drawloom.components.proving.prover import Prover  # imports torch
    from drawloom.components.proving.run import Subject

    if isinstance(subject, str):
        named = Subject(subject, words, imports=[imports] if isinstance(imports, str) else imports, nodes=nodes)
    else:
        named = Subject.of_class(subject, words)
    with nullcontext(prover) if prover else Prover() as opened:
        result = opened.prove(named, budget)
    expect(not result.exit_code, result.render("text"))
