"""Initial weights: their distribution, and the inputs they depend on."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.initial_weights import fill_with_initial_weights
from drawloom.components.model.dots1 import Dots1
from drawloom.components.model.mistral import Mistral
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.stages import MATRIX_ROLE
from support.families import small
from support.qwen3 import SPARSE_SIZES, dense, logits_of, one_document, sparse, whole

SCRIPT = """
import torch
from drawloom.components.model.decoder.initial_weights import fill_with_initial_weights
from drawloom.components.ports.stages import MATRIX_ROLE
tensor = torch.empty(8, 8)
fill_with_initial_weights("model.layers.0.self_attn.q_proj.weight", tensor, MATRIX_ROLE, seed=3, layers=2, std=0.02)
print(tensor.double().sum().item())
"""


def drawn(name: str, *shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    fill_with_initial_weights(name, tensor, MATRIX_ROLE, seed=seed, layers=8, std=0.02)
    return tensor


def test_residual_outputs_start_smaller_than_other_matrices() -> None:
    """Matrices have the configured standard deviation, and outputs to the residual stream 1/4 of it with 8 layers."""
    wide = {"hidden_size": 96, "intermediate_size": 128, "head_dim": 24, "vocab_size": 500, "num_hidden_layers": 8}
    experts = {"moe_intermediate_size": 128, "num_experts": 3, "first_k_dense_replace": 1}
    model = small(Dots1, **SPARSE_SIZES | wide | experts)
    for name, parameter in whole(model).named_parameters():
        model.initialize_parameter(name, parameter, seed=3)
        is_residual = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj"))
        if parameter.ndim > 1:
            assert abs(parameter.std() / (0.005 if is_residual else 0.02) - 1) < 0.05, name
            assert abs(parameter.mean()) < 0.002, name
        else:
            assert torch.equal(parameter, torch.ones_like(parameter)), name


def test_initial_values_depend_on_name_and_seed() -> None:
    """Another name or another seed gives other numbers; the same name and seed give the same numbers."""
    first = drawn("model.layers.0.self_attn.q_proj.weight", 8, 8)
    assert torch.equal(first, drawn("model.layers.0.self_attn.q_proj.weight", 8, 8))
    assert not torch.equal(first, drawn("model.layers.1.self_attn.q_proj.weight", 8, 8))
    assert not torch.equal(first, drawn("model.layers.0.self_attn.q_proj.weight", 8, 8, seed=4))


@pytest.mark.parametrize("make", [dense, sparse])
def test_a_slice_starts_as_in_the_whole_parameter(make: Callable[..., DecoderBuilder]) -> None:
    """Slices along rows, columns or experts have the whole parameter's numbers."""
    model = make()
    whole = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    for name, parameter in whole.named_parameters():
        model.initialize_parameter(name, parameter, seed=5)
        for dim, size in enumerate(parameter.shape):
            begin = size // 2
            part = torch.empty_like(parameter.narrow(dim, begin, size - begin))
            offsets = tuple(begin if axis == dim else 0 for axis in range(parameter.ndim))
            model.initialize_parameter(
                name, part, seed=5, tensor_slice=TensorSlice(tuple(parameter.shape), offsets, tuple(part.shape))
            )
            assert torch.equal(part, parameter.narrow(dim, begin, size - begin)), name


def test_lower_precision_starts_as_rounded_float32() -> None:
    """A bfloat16 parameter gets the float32 numbers, rounded."""
    assert torch.equal(drawn("lm_head.weight", 8, 8, dtype=torch.bfloat16), drawn("lm_head.weight", 8, 8).bfloat16())


def test_initial_values_are_equal_in_another_process() -> None:
    """Initial values do not depend on the salt of Python's hashes, which differs by process."""
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    result = subprocess.check_output([sys.executable, "-c", SCRIPT], env=environment, text=True)
    expected = torch.empty(8, 8)
    fill_with_initial_weights(
        "model.layers.0.self_attn.q_proj.weight", expected, MATRIX_ROLE, seed=3, layers=2, std=0.02
    )
    assert result == f"{expected.double().sum().item()}\n"


@pytest.mark.parametrize("make", [dense, sparse])
def test_initial_values_do_not_depend_on_spans(make: Callable[..., DecoderBuilder]) -> None:
    """A parameter starts the same in the whole model and in any span, and a tied head starts like the embedding."""
    model = make(num_hidden_layers=4, tie_word_embeddings=True)
    spans = [
        LayerRange(0, 4, True, True),
        LayerRange(0, 1, True, False),
        LayerRange(1, 3, False, False),
        LayerRange(3, 4, False, True),
    ]
    actual: dict[str, torch.Tensor] = {}
    for module in map(model.build, spans):
        for name, parameter in module.named_parameters():
            model.initialize_parameter(name, parameter, seed=5)
            assert torch.equal(actual.setdefault(name, parameter), parameter), name
    assert len(actual) == 4 * 11 + 2


MODELS: dict[str, tuple[Any, int]] = {
    "dense": (dense, 0),
    "tied": (lambda: dense(tie_word_embeddings=True), 0),
    "experts": (lambda: sparse(num_hidden_layers=3, mlp_only_layers=[1]), 2),
    "shared experts": (lambda: small(Dots1, **SPARSE_SIZES, n_shared_experts=2, first_k_dense_replace=1), 1),
}
"""What makes a model, and how many of its layers have experts."""


@pytest.mark.parametrize("kind", MODELS)
def test_operations_equal_the_count_of_torch(kind: str) -> None:
    """
    FLOPs of a forward and a backward pass equal torch's count for plain attention, which computes masked pairs too.
    """
    make, layers = MODELS[kind]
    model: DecoderBuilder = make()
    module, tokens = whole(model), torch.randint(model.vocab_size, (2, 11))
    counter: Any = FlopCounterMode(display=False)
    # torch does not count its fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), counter:
        logits_of(module, tokens, one_document(2, 11)).sum().backward()
    # Products by expert are one operation to torch: two choices, gate and up of 12 channels each, and down.
    experts = 22 * layers * 3 * 2 * 2 * (24 * 24 + 24 * 12)
    actual = model.forward_flops().count_training_flops(22, {None: 2 * 11 * 11})
    assert actual == counter.get_total_flops() + experts


def test_pair_flops_are_summed_by_window() -> None:
    """FLOPs per pair of tokens are summed over the layers with the same window."""
    flops = small(Mistral, sliding_window=4).forward_flops()
    assert flops.per_pair == {4: 2 * 4 * 4 * 8}
