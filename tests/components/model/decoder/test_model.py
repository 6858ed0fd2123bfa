"""Spans of a model: chained, they equal the whole model."""

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drawloom.components.model.decoder.builder import DecoderBuilder
from drawloom.components.model.decoder.model import check_hidden_states_request, compute_document_means
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.ports.model import HiddenStates, LayerRange, TokenContext
from drawloom.kernels.attention.eager import AttentionImplementation
from drawloom.kernels.attention.flex import FLEX
from support.qwen3 import (
    SIZES,
    cpu_kernels,
    dense,
    logits_of,
    losses_of,
    one_document,
    pack_documents,
    sparse,
    to,
    weights_of,
    whole,
)
from support.split_passes import (
    Products,
    assert_same_grads,
    compute_gradients_in_one_pass,
    grads_for,
    pop_grads,
    split_of,
)
from support.split_stages import Stage

SPLITS = [
    [LayerRange(0, 1, True, False), LayerRange(1, 3, False, True)],
    [LayerRange(0, 0, True, False), LayerRange(0, 3, False, False), LayerRange(3, 3, False, True)],
]


Make = Callable[..., DecoderBuilder]
both = pytest.mark.parametrize(
    "make", [dense, partial(sparse, mlp_only_layers=[1], router_aux_loss_coef=0.5)], ids=["dense", "with experts"]
)


def built(model: DecoderBuilder, spans: list[LayerRange], weights: nn.Module) -> list[nn.Module]:
    """Return the modules for spans, with the whole model's weights under the same names."""
    state = weights.state_dict()
    modules = [model.build(span) for span in spans]
    for module in modules:
        module.load_state_dict({name: state[name] for name in module.state_dict()})
    return modules


@pytest.mark.parametrize("spans", SPLITS, ids=["two spans", "three spans, ends without layers"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@both
def test_chained_spans_equal_the_whole(spans: list[LayerRange], tied: bool, make: Make) -> None:
    """Chained spans give bitwise the losses and logits of the whole; their gradients add up to its gradients."""
    model = make(num_hidden_layers=3, tie_word_embeddings=tied)
    module = whole(model)
    modules = built(model, spans, module)
    tokens, targets = torch.randint(29, (2, 2, 10))
    for shared, last in (
        (pack_documents([[4, 6], [10]]), partial(losses_of, targets=targets)),
        (one_document(2, 10), logits_of),
    ):
        weighted = attrs.evolve(shared, weights=weights_of(targets) if last is not logits_of else None)
        expected, actual = last(module, tokens, shared), tokens
        for part in modules[:-1]:
            actual = part(actual, weighted)
        actual = last(modules[-1], actual, shared)
        assert torch.equal(actual, expected)
        module.zero_grad()
        for part in modules:
            part.zero_grad()
        expected.sum().backward()
        torch.autograd.backward(actual.sum())
        for name, parameter in module.named_parameters():
            grads = [dict(part.named_parameters())[name].grad for part in modules if name in part.state_dict()]
            total = torch.stack([grad for grad in grads if grad is not None]).sum(0)
            torch.testing.assert_close(total, parameter.grad)


def with_flex(make: Make) -> tuple[nn.Module, list[torch.Tensor]]:
    """Return a model with torch's flexible attention, which runs forward on a CPU, and the documents of its masks."""
    kernels, asked = cpu_kernels(), []

    def mask(documents: torch.Tensor, window: int | None) -> Any:
        asked.append(documents)
        return FLEX.mask(documents, window)

    kernels._functions["attention"] = AttentionImplementation(mask, FLEX.attend)
    return whole(make(num_hidden_layers=3, kernels=kernels)), asked


@both
@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_mask_is_made_once_for_all_layers(make: Make) -> None:
    """
    Each pass makes one mask of its own documents, even if the next microbatch overwrites the last one's documents.
    """
    module, asked = with_flex(make)
    plain = make(num_hidden_layers=3).build(LayerRange(0, 3, embedding=True, head=True))
    plain.load_state_dict(module.state_dict())
    tokens, shared = torch.randint(29, (2, 10)), pack_documents([[4, 6], [10]])
    for number in range(2):
        actual = module(tokens, shared)
        torch.testing.assert_close(actual, plain(tokens, shared), atol=1e-4, rtol=1e-4)
        assert len(asked) == number + 1
        shared.document_ids.copy_(pack_documents([[7, 3], [1, 9]]).document_ids)


@both
def test_masks_are_made_on_the_meta_device(make: Make) -> None:
    """On the meta device the mask has a shape but no values, and the output has its shape."""
    module, _ = with_flex(make)
    shared = to(torch.device("meta"), pack_documents([[4, 6], [10]]))
    assert logits_of(module.to("meta"), shared.positions, shared).shape == (2, 10, 29)


@pytest.mark.parametrize("spans", SPLITS)
@both
def test_names_do_not_depend_on_the_split(spans: list[LayerRange], make: Make) -> None:
    """Spans name their parameters like the whole model and together have all of them; a tied head has the embedding."""
    for tied in (False, True):
        model = make(num_hidden_layers=3, tie_word_embeddings=tied)
        names = [name for span in spans for name, _ in model.build(span).named_parameters()]
        assert set(names) == {name for name, _ in whole(model).named_parameters()}
        assert names.count("model.embed_tokens.weight") == (2 if tied else 1)
        assert len(names) == len(set(names)) + tied


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ends", [(True, True), (True, False), (False, False), (False, True)])
@both
def test_stages_defer_every_weight_gradient(ends: tuple[bool, bool], tied: bool, recompute: bool, make: Make) -> None:
    """Two backward passes, the first without weight gradients, equal a single one on any stage, recomputed or not."""
    model = make(tie_word_embeddings=tied)
    module = model.build(LayerRange(0, 2, *ends)).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    if recompute:
        for block in module.get_submodule("model.layers").children():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    shared, targets = one_document(2, 10), torch.randint(29, (2, 10))
    weighted = attrs.evolve(shared, weights=weights_of(targets))
    hidden = torch.randn(2, 10, model.architecture.hidden_size, dtype=torch.float64, requires_grad=True)
    inputs = [torch.randint(29, (2, 10)) if ends[0] else hidden]
    stage = Stage(
        lambda s, x: losses_of(s.module, x, shared, targets) if ends[1] else s.module(x, weighted), module=module
    )
    expected, (split, outputs) = compute_gradients_in_one_pass(stage, inputs), split_of(stage, inputs)
    with Products() as first:
        actual = split.backward_input(outputs, grads_for(outputs), inputs)
    with Products() as second:
        split.backward_weight()
    assert_same_grads((actual, pop_grads(list(stage.parameters()))), expected)
    linear_layers = sum(parameter.ndim > 1 for parameter in module.parameters())
    assert second.count == linear_layers - ends[0] + (tied and all(ends))
    assert first.count > 0


LAYERS = SIZES["num_hidden_layers"]


def context(tokens: Tensor, **fields: Any) -> TokenContext:
    return TokenContext(torch.arange(tokens.shape[1]).repeat(len(tokens), 1), torch.zeros_like(tokens), **fields)


@pytest.fixture(scope="module")
def model() -> Qwen3Dense:
    return Qwen3Dense(kernels=cpu_kernels(), **SIZES)


def test_hidden_states_equal_those_of_transformers(model: Qwen3Dense) -> None:
    """They are the embedding's output, each layer's output, and the last output after the norm."""
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
def test_stages_pass_hidden_states_on_with_gradients(model: Qwen3Dense, documents: int | None) -> None:
    """On two stages, hidden states of all layers and their gradients equal the whole model's."""
    torch.manual_seed(0)
    module = whole(model)
    spans = [LayerRange(0, 1, True, False), LayerRange(1, LAYERS, False, True)]
    stages = [model.build(span) for span in spans]
    for stage in stages:
        stage.load_state_dict(
            {name: tensor for name, tensor in module.state_dict().items() if name in stage.state_dict()}
        )
    tokens = torch.randint(SIZES["vocab_size"], (2, 7))
    shared = context(tokens, hidden_states=HiddenStates((0, 1, LAYERS), documents))

    def total(both: Any) -> Tensor:
        return torch.stack([(states.double() ** 3).sum() * (n + 1) for n, states in both[1].items()]).sum()

    one, two = total(module(tokens, shared)), total(stages[1](stages[0](tokens, shared), shared))
    torch.testing.assert_close(one, two)
    torch.autograd.backward([one, two])
    actual = {
        name: parameter.grad
        for stage in stages
        for name, parameter in stage.named_parameters()
        if parameter.grad is not None
    }
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and not name.startswith("lm_head") and "embed_tokens" not in name:
            torch.testing.assert_close(actual[name], parameter.grad)


def test_a_mean_covers_the_tokens_of_a_document() -> None:
    """Means are float32, by row and document; documents beyond the count are ignored, and an empty one has zeros."""
    hidden = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    documents = torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0]])
    actual = compute_document_means(hidden, documents, 2)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual[0], torch.stack([hidden[0, :2].float().mean(0), hidden[0, 2].float()]))
    torch.testing.assert_close(actual[1], torch.stack([hidden[1].float().mean(0), torch.zeros(3)]))


def test_means_respect_masks_and_weights() -> None:
    """
    With a mask the mean covers the selected tokens; with weights it equals `torch.mean` over tokens repeated as often.
    A document of zero weight has zeros, and a finite gradient.
    """
    hidden = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    documents = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]])
    mask = torch.tensor([[True, False, True, True], [True, True, False, False]])
    actual = compute_document_means(hidden, documents, 2, mask)
    torch.testing.assert_close(actual[0], torch.stack([hidden[0, [0, 2]].mean(0), hidden[0, 3]]))
    torch.testing.assert_close(actual[1], torch.stack([hidden[1, :2].mean(0), torch.zeros_like(hidden[0, 0])]))
    torch.autograd.backward(actual.sum())
    assert hidden.grad is not None and hidden.grad.isfinite().all()
    assert torch.equal(hidden.grad.any(-1), mask)
    weights = torch.tensor([[2.0, 0.0, 1.0, 0.25], [0.5, 0.5, 1.0, 0.0]])
    actual = compute_document_means(hidden, documents, 2, weights)
    torch.testing.assert_close(actual[0], torch.stack([hidden[0, [0, 0, 2]].mean(0), hidden[0, 3]]))


def test_means_use_the_weights_of_the_batch(model: Qwen3Dense) -> None:
    """The model's means cover the tokens in `mean_weights`, for every layer."""
    module, tokens = whole(model), torch.arange(10).view(2, 5)
    mask = torch.tensor([[True, True, False, False, False], [False, False, False, False, True]])
    layers = tuple(range(LAYERS + 1))
    _, states = module(tokens, context(tokens, hidden_states=HiddenStates(layers)))
    _, pooled = module(tokens, context(tokens, hidden_states=HiddenStates(layers, documents=1), mean_weights=mask))
    for layer in layers:
        expected = torch.stack([states[layer][0, :2].mean(0), states[layer][1, 4]])
        torch.testing.assert_close(pooled[layer][:, 0], expected)


def test_impossible_means_are_refused() -> None:
    """A layer beyond the model, a mask without means, and rows split over ranks are refused."""
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="no hidden states of layer 3: the model has layers 0 to 2"):
        check_hidden_states_request(context(tokens, hidden_states=HiddenStates((3,))), 2)
    with pytest.raises(ValueError, match="mean_weights needs document means"):
        check_hidden_states_request(context(tokens, hidden_states=HiddenStates((1,)), mean_weights=tokens), 2)
    part: Any = object()
    with pytest.raises(ValueError, match="hidden states can't be returned with context parallelism"):
        check_hidden_states_request(context(tokens, hidden_states=HiddenStates((1,)), part=part), 2)
