"""Hidden states of layers, against transformers and over stages."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.components.model.decoder.hidden_states import Collector, means
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.ports.model import BatchContext, HiddenStates, LayerRange
from support.qwen3 import SIZES, cpu_kernels, whole

LAYERS = SIZES["num_hidden_layers"]


def context(tokens: Tensor, **fields: Any) -> BatchContext:
    return BatchContext(torch.arange(tokens.shape[1]).repeat(len(tokens), 1), torch.zeros_like(tokens), **fields)


@pytest.fixture(scope="module")
def model() -> Qwen3Dense:
    return Qwen3Dense(kernels=cpu_kernels(), **SIZES)


def test_layers_are_those_of_transformers(model: Qwen3Dense) -> None:
    """The embedding's output, each layer's, and the last one's after the norm."""
    torch.manual_seed(0)
    module = whole(model)
    from transformers import Qwen3Config, Qwen3ForCausalLM  # takes seconds

    theirs = Qwen3ForCausalLM(Qwen3Config(**model.hugging_face_config()))
    theirs.load_state_dict({**module.state_dict()}, strict=False)
    tokens = torch.randint(SIZES["vocab_size"], (2, 7))
    wanted = HiddenStates(tuple(range(LAYERS + 1)))
    last, kept = module(tokens, context(tokens, hidden_states=wanted))
    expected = theirs(tokens, output_hidden_states=True).hidden_states
    assert [*kept] == [*range(LAYERS + 1)] and len(expected) == LAYERS + 1
    for number, states in kept.items():
        torch.testing.assert_close(states, expected[number], rtol=1e-5, atol=1e-5)
    assert torch.equal(last, kept[LAYERS])
    assert torch.equal(module(tokens, context(tokens)), last), "asked or not, the last hidden states are the same"


@pytest.mark.parametrize("documents", [None, 2])
def test_stages_hand_them_on_with_their_gradients(model: Qwen3Dense, documents: int | None) -> None:
    """Over two stages they are those of the whole model, and so are the gradients that come through them."""
    torch.manual_seed(0)
    module = whole(model)
    spans = [LayerRange(0, 1, True, False), LayerRange(1, LAYERS, False, True)]
    stages = [model.build(span) for span in spans]
    for stage in stages:
        stage.load_state_dict({name: each for name, each in module.state_dict().items() if name in stage.state_dict()})
    tokens = torch.randint(SIZES["vocab_size"], (2, 7))
    shared = context(tokens, hidden_states=HiddenStates((0, 1, LAYERS), documents))

    def total(both: Any) -> Tensor:
        return torch.stack([(states.double() ** 3).sum() * (n + 1) for n, states in both[1].items()]).sum()

    one, two = total(module(tokens, shared)), total(stages[1](stages[0](tokens, shared), shared))
    torch.testing.assert_close(one, two)
    torch.autograd.backward([one, two])
    found = {name: each.grad for stage in stages for name, each in stage.named_parameters() if each.grad is not None}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and not name.startswith("lm_head") and "embed_tokens" not in name:
            torch.testing.assert_close(found[name], parameter.grad)


def test_a_mean_is_over_the_tokens_of_a_document() -> None:
    """Each row's documents, in float32; those beyond the count are left out, and one without tokens has zeros."""
    hidden = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    documents = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0]])
    found = means(hidden, documents, 2)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0], torch.stack([hidden[0, :2].float().mean(0), hidden[0, 2].float()]))
    torch.testing.assert_close(found[1], torch.stack([hidden[1].float().mean(0), torch.zeros(3)]))


def test_what_can_not_be_had_is_refused() -> None:
    """A layer that the model does not have, and rows that ranks share out."""
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="no hidden states of layer 3: the model has layers 0 to 2"):
        Collector.of(tokens, context(tokens, hidden_states=HiddenStates((3,))), 2)
    part: Any = object()
    with pytest.raises(ValueError, match="hidden states are of whole rows"):
        Collector.of(tokens, context(tokens, hidden_states=HiddenStates((1,)), part=part), 2)
