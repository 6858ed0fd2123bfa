"""Factors of a head tied to the embedding."""

import torch

from drawloom.components.adapters.lora_layers import LoraTiedHead
from drawloom.components.weights.adapted import disable_adapters
from support.adapted import adapt, lora
from support.qwen3 import dense, logits_of, one_document


def test_the_head_has_factors_and_the_embedding_none() -> None:
    """Logits are the tied head's and scale * B A; the embedding's outputs, and all without adapters, are the base's."""
    model = dense(tie_word_embeddings=True)
    module, base = adapt(model, lora("lm_head")), adapt(model)
    head = module.lm_head
    assert isinstance(head, LoraTiedHead) and {name for name, _ in head.named_parameters()} == {"lora_A", "lora_B"}
    trained = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    assert trained == ["lm_head.lora_A", "lm_head.lora_B"]
    tokens = torch.arange(14).view(2, 7)
    context = one_document(2, 7)
    hidden, same = module(tokens, context), base(tokens, context)
    assert torch.equal(hidden, same)
    change = 2.0 * hidden @ head.lora_A.T @ head.lora_B.T
    plain = logits_of(base, tokens, context)
    torch.testing.assert_close(logits_of(module, tokens, context), plain + change)
    with disable_adapters([module]):
        assert torch.equal(logits_of(module, tokens, context), plain)
