"""Experts on the rank of their tokens; the port's contract tests dispatching."""

from drawloom.components.experts.local import LocalExperts
from drawloom.components.ports.experts import supports_expert_parallel
from support.qwen3 import cpu_kernels


def test_tokens_stay_on_their_rank() -> None:
    """`check` therefore knows that ranks cannot partition experts with it."""
    assert not supports_expert_parallel(LocalExperts)
    assert not supports_expert_parallel(LocalExperts(kernels=cpu_kernels()))
