"""The loss in the contract of its port; `drawloom_check_port` is a fixture that drawloom brings."""

from collections.abc import Callable

from drawloom_tempered.loss import Tempered

from drawloom.ports import Loss


def test_it_keeps_the_contract_of_losses(drawloom_check_port: Callable[..., None]) -> None:
    """It does what drawloom promises of every loss."""
    drawloom_check_port(Tempered, Loss)
