"""Initial weights: what they are, and what they depend on."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from drawloom.components.model.decoder.builder import DecoderBuilder, fill_with_initial_weights
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.slices import TensorSlice
from support.qwen3 import dense, sparse

SCRIPT = """
import torch
from drawloom.components.model.decoder.builder import fill_with_initial_weights
tensor = torch.empty(8, 8)
fill_with_initial_weights("model.layers.0.self_attn.q_proj.weight", tensor, seed=3, layers=2, std=0.02)
print(tensor.double().sum().item())
"""


def drawn(name: str, *shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    fill_with_initial_weights(name, tensor, seed=seed, layers=8, std=0.02)
    return tensor


def test_scale() -> None:
    """Matrices have the standard deviation asked for, those that add to the residual stream 1/4 of it with 8 layers."""
    for name, std in (
        ("model.embed_tokens.weight", 0.02),
        ("model.layers.1.self_attn.q_proj.weight", 0.02),
        ("lm_head.weight", 0.02),
    ):
        assert abs(drawn(name, 300, 200).std() / std - 1) < 0.02
    for name in ("model.layers.7.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        assert abs(drawn(name, 300, 200).std() / 0.005 - 1) < 0.02
    experts = drawn("model.layers.0.mlp.experts.down_proj", 3, 200, 100)
    assert (experts.std((1, 2)) / 0.005 - 1).abs().max() < 0.02
    assert abs(drawn("lm_head.weight", 300, 200).mean()) < 0.0005


def test_norms_are_one() -> None:
    """Weights of norms start at 1."""
    assert torch.equal(drawn("model.layers.0.self_attn.q_norm.weight", 16), torch.ones(16))


def test_depends_on_name_and_seed() -> None:
    """Another name, or another seed, gives other numbers; the same ones give the same."""
    first = drawn("model.layers.0.self_attn.q_proj.weight", 8, 8)
    assert torch.equal(first, drawn("model.layers.0.self_attn.q_proj.weight", 8, 8))
    assert not torch.equal(first, drawn("model.layers.1.self_attn.q_proj.weight", 8, 8))
    assert not torch.equal(first, drawn("model.layers.0.self_attn.q_proj.weight", 8, 8, seed=4))


@pytest.mark.parametrize("make", [dense, sparse])
def test_a_slice_begins_as_in_the_whole(make: Callable[..., DecoderBuilder]) -> None:
    """Rows or columns of a parameter, experts among them, have the numbers that they have in all of it."""
    model = make()
    whole = model.build(LayerRange(0, model.num_hidden_layers, True, True))
    for name, parameter in whole.named_parameters():
        model.initialise(name, parameter, seed=5)
        for dim, size in enumerate(parameter.shape):
            begin = size // 2
            part = torch.empty_like(parameter.narrow(dim, begin, size - begin))
            offsets = tuple(begin if each == dim else 0 for each in range(parameter.ndim))
            model.initialise(
                name, part, seed=5, part_of=TensorSlice(tuple(parameter.shape), offsets, tuple(part.shape))
            )
            assert torch.equal(part, parameter.narrow(dim, begin, size - begin)), name


def test_lower_precision_is_float32_rounded() -> None:
    """A bfloat16 parameter gets the float32 numbers, rounded."""
    assert torch.equal(drawn("lm_head.weight", 8, 8, dtype=torch.bfloat16), drawn("lm_head.weight", 8, 8).bfloat16())


def test_same_in_another_process() -> None:
    """No salt of Python's hashes gets in: this process has another than the one that is started."""
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    result = subprocess.check_output([sys.executable, "-c", SCRIPT], env=environment, text=True)
    expected = torch.empty(8, 8)
    fill_with_initial_weights("model.layers.0.self_attn.q_proj.weight", expected, seed=3, layers=2, std=0.02)
    assert result == f"{expected.double().sum().item()}\n"


@pytest.mark.parametrize("make", [dense, sparse])
def test_does_not_depend_on_spans(make: Callable[..., DecoderBuilder]) -> None:
    """A parameter starts the same in the whole model and in any span, a tied head like the embedding."""
    model = make(num_hidden_layers=4, tie_word_embeddings=True)
    spans = [
        LayerRange(0, 4, True, True),
        LayerRange(0, 1, True, False),
        LayerRange(1, 3, False, False),
        LayerRange(3, 4, False, True),
    ]
    found: dict[str, torch.Tensor] = {}
    for module in map(model.build, spans):
        for name, parameter in module.named_parameters():
            model.initialise(name, parameter, seed=5)
            assert torch.equal(found.setdefault(name, parameter), parameter), name
    assert len(found) == 4 * 11 + 2
