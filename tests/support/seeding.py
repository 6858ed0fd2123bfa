"""
torch's random numbers in property tests: Hypothesis seeds and restores them like Python's and numpy's.

Each example begins with the same seed, and the earlier state is restored after it: failures are reproducible. A test
whose examples should differ in their random numbers draws from `seeds`, which are printed with a failing example.
"""

import torch
from hypothesis import register_random
from hypothesis import strategies as st
from torch import Tensor

SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
"""Without a GPU `torch.manual_seed` keeps stack traces for every kind of device, which takes 0.3 ms an example."""


class TorchRandom:
    """
    torch's default generators, as one object for Hypothesis to seed, save and restore. GPU generators are seeded, not
    saved.
    """

    def seed(self, seed: int) -> None:
        SEED(seed)

    def getstate(self) -> Tensor:
        return torch.get_rng_state()

    def setstate(self, state: Tensor) -> None:
        torch.set_rng_state(state)


TORCH = TorchRandom()
register_random(TORCH)

seeds = st.random_module()
"""An example's own seed: drawing it seeds the generators."""
