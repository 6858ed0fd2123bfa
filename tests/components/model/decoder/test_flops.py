"""The operations of decoders, against torch's counter of those that are carried out."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.dots1 import Dots1
from drawloom.components.model.mistral import Mistral
from support.families import small
from support.qwen3 import SPARSE_SIZES, dense, logits_of, one_document, sparse, whole

MODELS: dict[str, tuple[Any, int]] = {
    "dense": (dense, 0),
    "tied": (lambda: dense(tie_word_embeddings=True), 0),
    "experts": (lambda: sparse(num_hidden_layers=3, mlp_only_layers=[1]), 2),
    "shared experts": (lambda: small(Dots1, **SPARSE_SIZES, n_shared_experts=2, first_k_dense_replace=1), 1),
}
"""What makes a model, and how many of its layers have experts."""


@pytest.mark.parametrize("kind", MODELS)
def test_operations_are_those_that_torch_counts(kind: str) -> None:
    """Of a forward and a backward pass, in which plain attention computes every pair, also those it masks."""
    make, layers = MODELS[kind]
    model: DecoderBuilder = make()
    module, tokens = whole(model), torch.randint(model.vocab_size, (2, 11))
    counter: Any = FlopCounterMode(display=False)
    # torch does not count its fused attention on a CPU.
    with sdpa_kernel(SDPBackend.MATH), counter:
        logits_of(module, tokens, one_document(2, 11)).sum().backward()
    # Products by expert are one operation to torch: two choices, gate and up of 12 channels each, and down.
    experts = 22 * layers * 3 * 2 * 2 * (24 * 24 + 24 * 12)
    found = model.forward_flops().of_training(22, {None: 2 * 11 * 11})
    assert found == counter.get_total_flops() + experts


def test_windows_have_pairs_of_their_own() -> None:
    """Layers are counted by their windows."""
    flops = small(Mistral, sliding_window=4).forward_flops()
    assert flops.per_pair == {4: 2 * 4 * 4 * 8}
