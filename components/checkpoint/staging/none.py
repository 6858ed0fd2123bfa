"""No staging: the state itself is written."""

from typing import ClassVar

from drawloom import component
from drawloom.ports import NodeState


@component(impact="safe")
class NoStaging:
    """Stager without a copy: training waits until the state is on disk, and needs no extra memory."""

    # torch's async_save reads both names
    should_synchronize_after_execute: ClassVar[bool] = True
    _synchronize_after_execute: ClassVar[bool] = True
    makes_copies: ClassVar[bool] = False

    def stage(self, state_dict: NodeState) -> NodeState:
        """Return the state itself."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
