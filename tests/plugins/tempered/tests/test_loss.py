"""The loss keeps its port's contract; `drawloom_check_port` is one of drawloom's fixtures."""

from collections.abc import Callable

from drawloom_tempered.loss import Tempered

from drawloom.ports import Loss


def test_loss_keeps_the_contract_of_its_port(drawloom_check_port: Callable[..., None]) -> None:
    """The loss behaves as drawloom requires of every loss."""
    drawloom_check_port(Tempered, Loss)
