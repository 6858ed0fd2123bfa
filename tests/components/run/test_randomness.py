"""The global random generators of a process."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from drawloom.components.run.generators import set_generator_states
from drawloom.components.run.randomness import ProcessRandomness


@pytest.fixture(autouse=True)
def own_generators(job: Any, one_rank: Any) -> Iterator[None]:
    """Restore the generators after the test."""
    before = ProcessRandomness(job=job, mesh=one_rank).state_dict()
    yield
    set_generator_states(before)


@pytest.fixture
def open_randomness(job: Any, one_rank: Any) -> Callable[..., ProcessRandomness]:
    """Opens a node with a seed and a rank."""

    def make(seed: int = 1, rank: int = 0) -> ProcessRandomness:
        mesh = attrs.evolve(one_rank, world=attrs.evolve(one_rank.world, rank=rank))
        node = ProcessRandomness(job=attrs.evolve(job, seed=seed), mesh=mesh)
        node.open()
        return node

    return make


def _draws() -> list[Any]:
    """Draw from every generator; an odd number of normal ones leaves a cached second half."""
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        [random.random(), random.gauss(0, 1), random.randrange(10**30)],
        [np.random.random(), *np.random.standard_normal(3).tolist(), np.random.permutation(5).tolist()],
    ]


def test_every_generator_resumes_from_its_state(open_randomness: Callable[..., ProcessRandomness]) -> None:
    """After load_state_dict all four repeat the draws after state_dict, cached normals included."""
    node = open_randomness()
    _draws()
    state = node.state_dict()
    expected = _draws()
    _draws()
    node.load_state_dict(state)
    assert _draws() == expected


def test_state_survives_json(open_randomness: Callable[..., ProcessRandomness]) -> None:
    """With its tensors separate, the state goes through JSON and restores the same sequence."""
    node = open_randomness()
    state = node.state_dict()
    expected = _draws()
    node.load_state_dict(_through_json(state))
    assert _draws() == expected


def test_generators_depend_on_seed_and_rank(open_randomness: Callable[..., ProcessRandomness]) -> None:
    """Equal seed and rank give equal numbers in every generator; a change of either changes all."""
    draws = {}
    for seed, rank in [(1, 0), (1, 1), (2, 0)]:
        open_randomness(seed, rank)
        draws[seed, rank] = _draws()
    open_randomness(1, 0)
    assert _draws() == draws[1, 0]
    for other in ((1, 1), (2, 0)):
        assert all(mine != theirs for mine, theirs in zip(draws[1, 0], draws[other], strict=True))


def test_close_restores_the_generators(
    open_randomness: Callable[..., ProcessRandomness], job: Any, one_rank: Any
) -> None:
    """A program's own draws are the same with and without a run in between."""
    before = ProcessRandomness(job=job, mesh=one_rank).state_dict()
    expected = _draws()
    set_generator_states(before)
    node = open_randomness()
    _draws()
    node.close()
    assert _draws() == expected
    node.close()
    assert _draws() != expected


def test_a_gpu_state_loads_without_a_gpu(open_randomness: Callable[..., ProcessRandomness]) -> None:
    """A checkpoint from a GPU loads on a CPU."""
    node = open_randomness()
    state = node.state_dict() | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    expected = _draws()
    node.load_state_dict(state)
    assert _draws() == expected


def _through_json(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _through_json(value) for key, value in item.items()}
    return item.clone() if isinstance(item, torch.Tensor) else json.loads(json.dumps(item))


@pytest.mark.gpu
def test_the_gpu_generator_resumes_from_its_state(open_randomness: Callable[..., ProcessRandomness]) -> None:
    """After load_state_dict it repeats the draws after state_dict."""
    torch.rand(5, device="cuda")
    node = open_randomness()
    state = node.state_dict()
    expected = torch.randn(9, device="cuda").tolist()
    torch.rand(3, device="cuda")
    node.load_state_dict(state)
    assert torch.randn(9, device="cuda").tolist() == expected
