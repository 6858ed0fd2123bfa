"""
torch's random numbers in property tests: Hypothesis looks after them as it does after Python's and numpy's.

Each example begins with the same seed, and what was before is restored after it, so that a failure can be run again. A
test whose examples are to differ in their numbers too, and not in their sizes alone, draws from `seeds`; what it draws
is printed with the example that fails.
"""

import torch
from hypothesis import register_random
from hypothesis import strategies as st
from torch import Tensor


class TorchRandom:
    """torch's default generators, as Hypothesis seeds, saves and restores one; those of GPUs are seeded, not saved."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> Tensor:
        return torch.get_rng_state()

    def setstate(self, state: Tensor) -> None:
        torch.set_rng_state(state)


TORCH = TorchRandom()
register_random(TORCH)

seeds = st.random_module()
"""An example's own seed: drawing it seeds the generators."""
