"""The model with experts compared with transformers' Qwen3 MoE, number by number."""

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.qwen3.moe import Qwen3Moe
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import LayerRange, Model
from drawloom.graph.types.port_match import find_mismatches
from support.families import assert_generated_as_whole_texts
from support.kernels import DEVICE
from support.qwen3 import kernels_on, logits_of, losses_of, one_document, pack_documents, sparse, to, twin, whole

SHAPES: dict[str, dict[str, Any]] = {
    "two of five": {},
    "tied, not normalised": {"tie_word_embeddings": True, "norm_topk_prob": False},
    "every other layer": {"num_hidden_layers": 3, "decoder_sparse_step": 2},
    "some layers dense": {"num_hidden_layers": 3, "mlp_only_layers": [0]},
    "one expert of one": {"num_hidden_layers": 1, "num_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": False},
    "all experts, odd sizes": {
        "hidden_size": 17,
        "num_experts": 3,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 5,
    },
    "scaled positions": {
        "rope_scaling": RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
        "num_hidden_layers": 1,
    },
    "mostly empty experts": {"num_hidden_layers": 1, "num_experts": 70, "num_experts_per_tok": 2},
}
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(params=list(SHAPES.values()), ids=list(SHAPES))
def model(request: pytest.FixtureRequest) -> Qwen3Moe:
    """Return a model of each shape, without balancing."""
    torch.manual_seed(0)
    return sparse(router_aux_loss_coef=0.0, **request.param)


def random_rows(model: Qwen3Moe, rows: int, length: int) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(model.vocab_size, (2, rows, length))
    return tokens, targets.masked_fill(torch.rand(rows, length) < 0.2, IGNORE_INDEX)


def test_moe_model_fits_its_port() -> None:
    """The component keeps the contract of Model."""
    assert find_mismatches(Qwen3Moe, Model) == []


def test_logits_equal(model: Qwen3Moe) -> None:
    """The head gives transformers' logits."""
    module, tokens = whole(model), torch.randint(model.vocab_size, (3, 19))
    expected = twin(model, dict(module.named_parameters()))(tokens).logits
    actual = logits_of(module, tokens, one_document(3, 19))
    assert actual.abs().max() > 0.1
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_a_cache_gives_the_logits_of_the_whole_text(model: Qwen3Moe) -> None:
    """A text computed token by token with a cache has the logits of the whole text."""
    assert_generated_as_whole_texts(model)


def test_losses_and_every_gradient_equal_transformers(model: Qwen3Moe) -> None:
    """Every token's loss and every parameter's gradient equal values computed from transformers' logits."""
    assert_parity(model, *random_rows(model, 2, 23))


@settings(max_examples=15)
@given(st.data())
def test_parity_holds_for_random_sizes(data: st.DataObject) -> None:
    """Losses and gradients equal transformers' for any number of layers, experts, choices and tokens."""
    torch.manual_seed(data.draw(st.integers(0, 9)))
    experts, layers = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    dense = data.draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    model = sparse(
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=data.draw(st.integers(1, experts)),
        moe_intermediate_size=data.draw(st.integers(1, 20)),
        norm_topk_prob=data.draw(st.booleans()),
        mlp_only_layers=sorted(dense),
        router_aux_loss_coef=0.0,
    )
    assert_parity(model, *random_rows(model, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 9))))


def assert_parity(model: Qwen3Moe, tokens: Tensor, targets: Tensor) -> None:
    module = whole(model).to(tokens.device)
    shared = to(tokens.device, one_document(*tokens.shape))
    theirs = twin(model, dict(module.named_parameters())).to(tokens.device)
    losses = losses_of(module, tokens, shared, targets)
    logits = theirs(tokens).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none").view_as(losses)
    torch.testing.assert_close(losses, expected, **CLOSE)
    weights = torch.rand(losses.shape).to(losses.device)
    assert_gradients_equal(module, theirs, (losses * weights).sum(), (expected * weights).sum())


def assert_gradients_equal(module: nn.Module, theirs: nn.Module, our_loss: Tensor, their_loss: Tensor) -> None:
    """Assert that parameters have transformers' names and gradients."""
    ours, others = dict(module.named_parameters()), dict(theirs.named_parameters())
    assert sorted(ours) == sorted(others)
    ours = {name: parameter for name, parameter in ours.items() if parameter.requires_grad}
    actual = torch.autograd.grad(our_loss, list(ours.values()))
    expected = torch.autograd.grad(their_loss, [others[name] for name in ours], materialize_grads=True)
    for gradient, reference in zip(actual, expected, strict=True):
        size = max(1.0, reference.abs().max().item())  # sums of many terms round by their size
        torch.testing.assert_close(gradient / size, reference / size, **CLOSE)


def test_packed_documents_equal_each_alone() -> None:
    """In packed rows, losses equal those of each document alone."""
    model = sparse()
    module, (tokens, targets) = whole(model), random_rows(model, 2, 16)
    lengths = [[7, 1, 8], [16]]
    losses = losses_of(module, tokens, pack_documents(lengths), targets)
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            part = slice(start, start + length)
            alone = losses_of(
                module, tokens[row : row + 1, part], one_document(1, length), targets[row : row + 1, part]
            )
            torch.testing.assert_close(losses[row : row + 1, part], alone, **CLOSE)
            start += length


@pytest.mark.parametrize("padded", [0, 46])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_balance_gradients_equal_those_of_transformers(normalised: bool, padded: int, is_frozen: bool) -> None:
    """
    With one row and one layer with experts, gradients are transformers' for its loss plus its auxiliary loss under an
    attention mask: padding does not count. A frozen router's loss still changes the layers below.
    """
    torch.manual_seed(1)
    model = sparse(num_hidden_layers=1, router_aux_loss_coef=0.7, norm_topk_prob=normalised)
    module, (tokens, targets) = whole(model), random_rows(model, 1, 23 + padded)
    theirs = twin(model, dict(module.named_parameters()), output_router_logits=True)
    mask = torch.arange(23 + padded)[None] < 23
    tokens, targets = tokens.where(mask, 3), targets.where(mask, IGNORE_INDEX)
    context = attrs.evolve(pack_documents([[23, padded] if padded else [23]]), padding=~mask)
    count = (targets != IGNORE_INDEX).sum()
    for router in [
        layer
        for name, layer in [*module.named_modules(), *theirs.named_modules()]
        if is_frozen and name.endswith("mlp.gate")
    ]:
        router.requires_grad_(False)
    actual = losses_of(module, tokens, context, targets).sum() / count
    # labels: for its auxiliary loss alone
    expected = theirs(tokens, attention_mask=mask, labels=F.pad(tokens, (0, 1), value=IGNORE_INDEX)[:, 1:])
    of_tokens = F.cross_entropy(expected.logits[0], targets[0], ignore_index=IGNORE_INDEX)
    whole_loss = of_tokens + 0.7 * expected.aux_loss
    torch.testing.assert_close(actual, of_tokens, **CLOSE)
    # Executors go back from the sum of losses, and what they find is divided by the number of tokens in the end.
    assert_gradients_equal(module, theirs, actual * count, whole_loss * count)


def test_balance_averages_over_layers_and_tokens() -> None:
    """Over rows and layers, it is the mean of transformers' loss, weighted by a row's tokens."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling  # takes seconds

    torch.manual_seed(2)
    model = sparse(num_hidden_layers=3, mlp_only_layers=[1], router_aux_loss_coef=0.7)
    module, (tokens, targets) = whole(model), random_rows(model, 3, 11)
    targets[1, 2:] = IGNORE_INDEX
    theirs = twin(model, dict(module.named_parameters()), output_router_logits=True)
    given = theirs(tokens)
    assert len(given.router_logits) == 2
    losses = F.cross_entropy(given.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
    for layer in given.router_logits:
        for row, logits in enumerate(layer.view(3, 11, -1)):
            auxiliary = modeling.load_balancing_loss_func((logits,), num_experts=5, top_k=2)
            losses = losses + 0.7 / 2 * (targets[row] != IGNORE_INDEX).sum() * auxiliary
    assert_gradients_equal(module, theirs, losses_of(module, tokens, one_document(3, 11), targets).sum(), losses)


def test_balance_does_not_depend_on_microbatches() -> None:
    """Gradients for single rows add up to the gradients for all rows at once."""
    model = sparse(router_aux_loss_coef=0.7)
    module, (tokens, targets) = whole(model).double(), random_rows(model, 4, 9)
    losses_of(module, tokens, one_document(4, 9), targets).sum().backward()
    at_once = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    for row in range(4):
        losses_of(module, tokens[row : row + 1], one_document(1, 9), targets[row : row + 1]).sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in module.parameters()], at_once)


def test_half_precision_runs() -> None:
    """In bfloat16 hidden states stay bfloat16, losses are float32, and every parameter gets a gradient."""
    model = sparse()
    module = whole(model).to(torch.bfloat16)
    tokens, targets = random_rows(model, 2, 9)
    losses = losses_of(module, tokens, one_document(2, 9), targets)
    gradients = torch.autograd.grad(losses.sum(), list(module.parameters()))
    assert losses.dtype == torch.float32
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


KERNELS: dict[str, dict[str, Any]] = {
    "routes": {"moe_routes": "triton"},
    "permutation": {"moe_permute": "triton", "moe_unpermute": "triton"},
    "swiglu": {"swiglu_halves": "triton"},
    "products": {"grouped_gemm": "triton"},
}
if DEVICE.type == "cpu":
    KERNELS["products of torch"] = {"grouped_gemm": "torch"}  # on GPUs it is for bfloat16
TRITON = {name: "triton" for choices in list(KERNELS.values())[:4] for name in choices}


@pytest.mark.parametrize("choices", [*KERNELS.values(), TRITON], ids=[*KERNELS, "all"])
def test_parity_holds_for_every_choice_of_kernels(choices: dict[str, Any]) -> None:
    """Losses and gradients equal transformers' with any kernels."""
    torch.manual_seed(0)
    model = sparse(kernels=kernels_on(DEVICE, **choices), router_aux_loss_coef=0.0)
    assert_parity(model, *(x.to(DEVICE) for x in random_rows(model, 2, 7)))


@pytest.mark.parametrize("choices", [{}, TRITON], ids=["eager", "triton"])
def test_no_shape_depends_on_values(choices: dict[str, Any]) -> None:
    """
    Forward and backward run on the meta device, which has no values: pipelines ask it for the shapes of messages.

    Then the host never waits for a GPU either, except in the eager product, whose loop is one operation to torch.
    """
    model = sparse(kernels=kernels_on(DEVICE, **choices))
    with torch.device("meta"):
        module = model.build(LayerRange(0, 2, embedding=True, head=True))
        tokens = torch.zeros(2, 7, dtype=torch.int64)
        losses = losses_of(module, tokens, one_document(2, 7), tokens)
        losses.sum().backward()
    assert losses.is_meta and losses.shape == (2, 7)
    assert all(parameter.grad is not None and parameter.grad.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("choices", [{}, TRITON], ids=["eager", "triton"])
def test_bfloat16_is_as_accurate_as_transformers(choices: dict[str, Any]) -> None:
    """
    With bfloat16 weights and activations, the error of logits against float64 is like transformers' error.

    Tokens visit all experts: a choice between two similar ones is not a matter of precision. A fifth more is allowed,
    as for a dense model.
    """
    torch.manual_seed(0)
    sizes = {
        "num_experts": 3,
        "num_experts_per_tok": 3,
        "vocab_size": 61,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
    }
    model = sparse(kernels=kernels_on(DEVICE, **choices), num_hidden_layers=3, **sizes)
    module, tokens = whole(model).to(DEVICE).bfloat16(), torch.randint(61, (2, 16)).to(DEVICE)
    theirs = twin(model, dict(module.named_parameters())).to(DEVICE)
    exact = theirs.double()(tokens).logits
    actual, peer = logits_of(module, tokens, to(DEVICE, one_document(2, 16))), theirs.bfloat16()(tokens).logits
    ours, others = ((logits.double() - exact).norm() / exact.norm() for logits in (actual, peer))
    assert actual.dtype == torch.bfloat16
    assert 1e-4 < ours < 1.2 * others


@pytest.mark.soak  # a minute; tests/kernels compiles each operation
@pytest.mark.parametrize("choices", [{}, TRITON], ids=["eager", "triton"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does
def test_the_model_compiles_without_graph_breaks(choices: dict[str, Any]) -> None:
    """Traced as one graph, the whole model has the same losses and gradients."""
    model = sparse(
        kernels=kernels_on(DEVICE, **choices), mlp_only_layers=[0], router_aux_loss_coef=0.3, num_hidden_layers=2
    )
    module, (tokens, targets) = whole(model).to(DEVICE), (x.to(DEVICE) for x in random_rows(model, 2, 11))
    shared = to(DEVICE, one_document(2, 11))
    runs = []
    model.kernels.import_operations()
    for called in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        losses = losses_of(called, tokens, shared, targets)
        runs.append((losses, *torch.autograd.grad(losses.sum(), list(module.parameters()))))
    torch.testing.assert_close(runs[1], runs[0], **CLOSE)
