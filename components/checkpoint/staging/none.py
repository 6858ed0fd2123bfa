"""No staging: the state itself is written."""

from typing import Any, ClassVar

import attrs

from drawloom.graph import component


@component(impact="safe")
class NoStaging:
    """Stager without a copy: training waits until the state is on disk, and needs no extra memory."""

    makes_copies: ClassVar[bool] = False

    _synchronize_after_execute: bool = attrs.field(init=False, default=True)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """True: torch's async_save waits for the upload before the state changes."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state itself."""
        return state_dict

    def synchronize_staging(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
