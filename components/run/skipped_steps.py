"""The limit on consecutive skipped steps."""

import attrs

from drawloom import UserError, internal
from drawloom.ports import Step


@attrs.define
class SkippedSteps:
    """
    Counter for consecutive skipped steps, equal on all ranks.

    It reads a step's numbers once the host can do so without idling a GPU.
    """

    limit: int
    _count: int = internal(0)
    _last: Step | None = internal(None)
    _unread: Step | None = internal(None)

    def add_completed_step(self, step: Step) -> None:
        """Add a completed step."""
        self._unread = step
        if step.state.is_on_host or step.is_last:
            self.wait_and_check_skip_limit()

    def wait_and_check_skip_limit(self) -> None:
        """
        Count the last step unless it is counted already, and wait for its numbers.

        Raises UserError after `limit` skipped steps in a row, before a later step changes weights.
        """
        step, self._unread = self._unread, None
        if step is None:
            return
        self._last = step
        self._count = self._count + 1 if step.skip_reason else 0
        if self._count >= self.limit:
            raise UserError(
                f"{self._count} steps in a row were skipped, at last step {step.index}: {step.skip_reason}; "
                "to go back, remove the checkpoints saved since then (the newest with a finite loss is always kept), "
                f"{_suggest_remedy(step)}, and start the run again"
            )

    def fail_if_last_step_skipped(self) -> None:
        """Raise UserError if the last step was skipped, because the results come from an earlier step's weights."""
        if self._count and self._last is not None:
            skipped = "step was" if self._count == 1 else f"{self._count} steps were"
            raise UserError(
                f"the last {skipped} skipped, at last step {self._last.index}: {self._last.skip_reason}; "
                f"the results are made from earlier weights; {_suggest_remedy(self._last)}, and start again under "
                "another run name"
            )


def _suggest_remedy(step: Step) -> str:
    """Return what helps against a skipped step's reason."""
    if "loss_weight" in step.state and step.state.number("loss_weight") <= 0:
        return (
            "raise the length of rows or batch.global_size until all steps have tokens to learn from; for sampled "
            "completions, see rewards and faults in rollouts.jsonl"
        )
    return "lower the learning rate or clip more"
