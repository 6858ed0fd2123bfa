"""The loss in the contract of its port; `check_port` is a fixture that drawloom brings."""

from collections.abc import Callable

from drawloom_tempered.loss import Tempered

from drawloom.components.ports.pipeline import Loss


def test_it_keeps_the_contract_of_losses(check_port: Callable[..., None]) -> None:
    """It does what drawloom promises of every loss."""
    check_port(Tempered, Loss)
