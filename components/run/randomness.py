"""
A process's global random generators: torch's, Python's and numpy's.

With `deterministic`, torch's process-wide settings make results on a GPU bitwise reproducible.
"""

from typing import TYPE_CHECKING, Any, ClassVar

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
        from drawloom.components.run.generators import Determinism, read_generator_states, seed_generators

        if self.deterministic:
            self._determinism_before = Determinism.read_current()
            Determinism.fully_deterministic().apply()
        self._before = read_generator_states()
        seed_generators(self.job.seed, self.mesh.world.rank)

    def close(self) -> None:
        """Restore the generators and the determinism settings from before the run."""
        if self._before is not None:
            from drawloom.components.run.generators import set_generator_states

            set_generator_states(self._before)
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
        from drawloom.components.run.generators import read_generator_states

        return read_generator_states()

    def load_state_dict(self, state: NodeState) -> None:
        """Set this rank's generator states; skip the GPU's if the state or this process has none."""
        from drawloom.components.run.generators import set_generator_states

        set_generator_states(state)
