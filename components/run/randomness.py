"""
A process's global random generators: torch's, Python's and numpy's.

With `deterministic`, torch's process-wide settings make results on a GPU bitwise reproducible.
"""

import random
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from drawloom import UserError, component, internal, setting
from drawloom.ports import Mesh, NodeState, RunInfo

if TYPE_CHECKING:
    from drawloom.components.run.generators import Determinism


@component
class ProcessRandomness:
    """
    Global generators' owner: seeds them for this rank, checkpoints their states, and restores them on close.

    Random numbers, and all results on a CPU, are reproducible. On a GPU some operations (atomic adds) sum in a
    different order in every run, unless `deterministic` is on.
    """

    state_is_local: ClassVar[bool] = True

    job: RunInfo
    mesh: Mesh
    deterministic: bool = setting(
        "whether GPUs use deterministic algorithms, which are slower; operations without one raise an error",
        default=False,
    )

    _before: dict[str, Any] | None = internal(None)
    _determinism_before: "Determinism | None" = internal(None)

    def open(self) -> None:
        """Seed every generator from the run's seed, the rank and the generator's name."""
        from drawloom.components.run.generators import Determinism, seed_generators

        if self.deterministic:
            self._determinism_before = Determinism.read_current()
            Determinism.fully_deterministic().apply()
        self._before = self.state_dict()
        seed_generators(self.job.seed, self.mesh.world.rank)

    def close(self) -> None:
        """Restore the generators and the determinism settings from before the run."""
        if self._before is not None:
            self.load_state_dict(self._before)
            self._before = None
        if self._determinism_before is not None:
            self._determinism_before.apply()
            self._determinism_before = None

    def on_failure(self, error: BaseException) -> BaseException | None:
        """Return a UserError for an operation without a deterministic implementation in torch."""
        # torch raises a plain RuntimeError for it; only its text tells it apart
        if not (self.deterministic and isinstance(error, RuntimeError) and "does not have a determ" in str(error)):
            return None
        refused = str(error).partition(", but you set")[0]
        return UserError(
            f"randomness.deterministic is on, and {refused} on this device; choose another implementation in "
            "[kernels], or write deterministic = false"
        )

    def stream(self, *purpose: str | int) -> torch.Generator:
        """Return a CPU generator for `purpose`, seeded from the run's seed without the rank: equal on all ranks."""
        from drawloom.components.distributed.rng import create_generator

        return create_generator(self.job.seed, *purpose)

    def state_dict(self) -> NodeState:
        """Return this rank's generator states."""
        version, words, gauss = random.getstate()
        numpy: Any = np.random.get_state(legacy=False)
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            "numpy": {
                "bit_generator": numpy["bit_generator"],
                # torch has few operations for uint32
                "words": torch.from_numpy(numpy["state"]["key"].astype(np.int64)),
                "position": int(numpy["state"]["pos"]),
                "has_gauss": int(numpy["has_gauss"]),
                "gauss": float(numpy["gauss"]),
            },
        }

    def load_state_dict(self, state: NodeState) -> None:
        """Set this rank's generator states; skip the GPU's if the state or this process has none."""
        from drawloom.components.run.generators import set_generator_states

        set_generator_states(state)
