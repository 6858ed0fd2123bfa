"""The durations of ops and messages, in any unit of time."""

import attrs
import numpy as np
from numpy.typing import NDArray


@attrs.frozen
class Costs:
    """How long a stage takes for one microbatch by op, and how long a message between ranks takes (`comm`)."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    backward: float = attrs.field()
    comm: float = 0.0

    @backward.default
    def _whole(self) -> float:
        return self.backward_input + self.backward_weight

    def of(self, work: NDArray[np.int64]) -> NDArray[np.float64]:
        """The duration of each action, by op codes (actions,)."""
        return np.array([self.forward, self.backward, self.backward_input, self.backward_weight])[work]

    def length(self, work: str) -> float:
        """The duration of one action, by the name of its op; any message takes `comm`."""
        lengths = {"F": self.forward, "B": self.backward, "I": self.backward_input, "W": self.backward_weight}
        return lengths.get(work, self.comm)
