"""A budget of tokens or time, after which a run ends."""

import time
from collections.abc import Callable, Iterator

import torch

from drawloom import NodeView, Problem, above, at_least, component, internal, setting
from drawloom.ports import Mesh, NodeState, Step


@component(reads=("tokens?",), impact="safe")
class Budget:
    """
    Budget of tokens or time: the run ends as after its last step, with the step that uses the budget up.

    It comes after the gradients are synchronized, which counts tokens, and before the evaluation. Time counts from each
    process's first step, with evaluation and saving, over all processes of the run; work after the last checkpoint of
    a killed process does not count. On a GPU the host waits for the tokens of every step. If the budget grows, the
    ended run goes on.
    """

    mesh: Mesh
    tokens: int | None = setting("training tokens in the whole run", default=None, check=at_least(1))
    minutes: float | None = setting("time of training in the whole run", default=None, check=above(0))

    clock: Callable[[], float] = internal(time.monotonic)
    _tokens: int = internal(0)
    _seconds: float = internal(0.0)
    _counted: float | None = internal(None)  # the time up to which seconds are counted

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Report a budget without a limit."""
        if node.settings.get("tokens") is None and node.settings.get("minutes") is None:
            yield node.problem("use", "the budget has no limit", "write tokens = 1_000_000, minutes = 60, or both")

    def run_phase(self, step: Step) -> None:
        """Count the step's tokens or time, and end the run if the budget is used up. A collective for a time limit."""
        if self.tokens is not None:
            self._tokens += step.tokens
        if self.minutes is not None:
            # Add the time since the last step, or since this process's first step began: the longest over all ranks
            now = self.clock()
            passed = torch.tensor(now - (step.started if self._counted is None else self._counted), dtype=torch.float64)
            self._counted = now
            self.mesh.world.max(passed)
            self._seconds += float(passed)
        if reason := self.stop_reason():
            step.stop(reason)

    def stop_reason(self) -> str:
        if self.tokens is not None and self._tokens >= self.tokens:
            return f"the budget of {self.tokens:,} tokens is used up"
        if self.minutes is not None and self._seconds >= 60 * self.minutes:
            return f"the budget of {self.minutes:g} minutes is used up"
        return ""

    def state_dict(self) -> NodeState:
        """Return the tokens and the seconds so far; 0 without a limit."""
        return {"tokens": self._tokens, "seconds": self._seconds}

    def load_state_dict(self, state: NodeState) -> None:
        self._tokens, self._seconds = int(state["tokens"]), float(state["seconds"])
        self._counted = None
