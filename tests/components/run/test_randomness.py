"""The generators of a process."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from drawloom.components.run.randomness import ProcessRandomness, generators, set_generators


@pytest.fixture(autouse=True)
def own_generators() -> Iterator[None]:
    """Other tests see nothing of this."""
    before = generators()
    yield
    set_generators(before)


@pytest.fixture
def opened(job: Any, one_rank: Any) -> Callable[..., ProcessRandomness]:
    """An open node of a seed and a rank."""

    def make(seed: int = 1, rank: int = 0) -> ProcessRandomness:
        mesh = attrs.evolve(one_rank, world=attrs.evolve(one_rank.world, rank=rank))
        node = ProcessRandomness(job=attrs.evolve(job, seed=seed), mesh=mesh)
        node.open()
        return node

    return make


def _draws() -> list[Any]:
    """Draws of every generator, and of the normal ones an odd number, so that a second half is left over."""
    return [
        torch.rand(3).tolist(),
        torch.randn(3).tolist(),
        [random.random(), random.gauss(0, 1), random.randrange(10**30)],
        [np.random.random(), *np.random.standard_normal(3).tolist(), np.random.permutation(5).tolist()],
    ]


def test_every_generator_goes_on_where_it_stood(opened: Callable[..., ProcessRandomness]) -> None:
    """After load_state_dict all four draw what they drew after state_dict, left-over halves of normals included."""
    node = opened()
    _draws()
    state = node.state_dict()
    expected = _draws()
    _draws()
    node.load_state_dict(state)
    assert _draws() == expected


def test_state_is_tensors_and_plain_json(opened: Callable[..., ProcessRandomness]) -> None:
    """It goes through JSON, tensors apart, and still restores the same sequence."""
    node = opened()
    state = node.state_dict()
    expected = _draws()
    node.load_state_dict(_through_json(state))
    assert _draws() == expected


def test_seed_and_rank_decide(opened: Callable[..., ProcessRandomness]) -> None:
    """The same seed and rank draw the same; another of either draws otherwise, in every generator."""
    draws = {}
    for seed, rank in [(1, 0), (1, 1), (2, 0)]:
        opened(seed, rank)
        draws[seed, rank] = _draws()
    opened(1, 0)
    assert _draws() == draws[1, 0]
    for other in ((1, 1), (2, 0)):
        assert all(mine != theirs for mine, theirs in zip(draws[1, 0], draws[other], strict=True))


def test_close_gives_back_what_was_there(opened: Callable[..., ProcessRandomness]) -> None:
    """A program that draws around a run draws what it would have drawn without it."""
    before = generators()
    expected = _draws()
    set_generators(before)
    node = opened()
    _draws()
    node.close()
    assert _draws() == expected
    node.close()
    assert _draws() != expected


def test_a_state_of_a_gpu_does_not_matter_without_one(opened: Callable[..., ProcessRandomness]) -> None:
    """A checkpoint that was made on a GPU loads on a CPU."""
    node = opened()
    state = node.state_dict() | {"cuda": torch.zeros(16, dtype=torch.uint8)}
    expected = _draws()
    node.load_state_dict(state)
    assert _draws() == expected


def _through_json(item: Any) -> Any:
    if isinstance(item, dict):
        return {key: _through_json(value) for key, value in item.items()}
    return item.clone() if isinstance(item, torch.Tensor) else json.loads(json.dumps(item))


@pytest.mark.gpu
def test_a_gpu_s_generator_goes_on_too(opened: Callable[..., ProcessRandomness]) -> None:
    """It draws what it drew after its state was taken."""
    torch.rand(5, device="cuda")
    node = opened()
    state = node.state_dict()
    expected = torch.randn(9, device="cuda").tolist()
    torch.rand(3, device="cuda")
    node.load_state_dict(state)
    assert torch.randn(9, device="cuda").tolist() == expected
