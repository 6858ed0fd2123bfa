"""The model against transformers' Qwen3, number by number."""

from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drawloom.components.model.decoder.rope import RopeScaling
from drawloom.components.model.qwen3.dense import Qwen3Dense
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import LayerRange, Model
from drawloom.graph import UserError
from drawloom.graph.types.port_match import find_mismatches
from support.families import assert_generated_as_whole_texts
from support.kernels import DEVICE
from support.qwen3 import (
    SIZES,
    cpu_kernels,
    dense,
    kernels_on,
    logits_of,
    losses_of,
    one_document,
    pack_documents,
    to,
    twin,
    whole,
)

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tie_word_embeddings": {"tie_word_embeddings": True},
    "every head its own keys": {"num_key_value_heads": 4},
    "one key head": {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "heads wider than the model": {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10},
    "one layer, odd sizes": {
        "num_hidden_layers": 1,
        "hidden_size": 17,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "intermediate_size": 5,
    },
    "another base and eps": {
        "rope_theta": 100.0,
        "rms_norm_eps": 0.1,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
    },
}
STRETCHED: dict[str, dict[str, Any]] = {
    "linear": {"rope_scaling": RopeScaling(rope_type="linear", factor=2.0)},
    "yarn": {
        "rope_scaling": RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
        "rope_theta": 100.0,
    },
    "yarn, every key": {
        "rope_scaling": RopeScaling(
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            beta_fast=2.0,
            beta_slow=0.5,
            truncate=False,
            attention_factor=1.5,
        )
    },
    "llama3": {
        "rope_scaling": RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=16),
        "rope_theta": 50.0,
    },
}
CLOSE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-5}


@pytest.fixture(params=[*SHAPES.values(), *STRETCHED.values()], ids=[*SHAPES, *STRETCHED])
def model(request: pytest.FixtureRequest) -> Qwen3Dense:
    """Return a model of each shape."""
    torch.manual_seed(0)
    return dense(**request.param)


def random_rows(model: Qwen3Dense, rows: int, length: int) -> tuple[Tensor, Tensor]:
    tokens, targets = torch.randint(model.vocab_size, (2, rows, length))
    return tokens, targets.masked_fill(torch.rand(rows, length) < 0.2, IGNORE_INDEX)


def test_dense_model_fits_its_port() -> None:
    """The component has the members of Model, with types that fit."""
    assert find_mismatches(Qwen3Dense, Model) == []


def test_logits_equal(model: Qwen3Dense) -> None:
    """The head gives transformers' logits."""
    module, tokens = whole(model), torch.randint(model.vocab_size, (3, 19))
    expected = twin(model, dict(module.named_parameters()))(tokens).logits
    actual = logits_of(module, tokens, one_document(3, 19))
    assert actual.abs().max() > 0.1
    torch.testing.assert_close(actual, expected, **CLOSE)


def test_a_cache_gives_the_logits_of_the_whole_text(model: Qwen3Dense) -> None:
    """A text computed token by token with a cache has the logits of the whole text."""
    assert_generated_as_whole_texts(model)


def test_losses_and_every_gradient_equal_transformers(model: Qwen3Dense) -> None:
    """Every token's loss and every parameter's gradient equal values computed from transformers' logits."""
    module, (tokens, targets) = whole(model), random_rows(model, 2, 23)
    theirs = twin(model, dict(module.named_parameters()))
    losses = losses_of(module, tokens, one_document(2, 23), targets)
    logits = theirs(tokens).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none").view(2, 23)
    torch.testing.assert_close(losses, expected, **CLOSE)
    weights = torch.rand(losses.shape)
    assert_gradients_equal(module, theirs, (losses * weights).sum(), (expected * weights).sum())


def test_packed_documents_equal_each_alone(model: Qwen3Dense) -> None:
    """In packed rows, losses and gradients equal transformers' on every document alone."""
    lengths = [[7, 1, 8], [16], [3, 13]]
    module, (tokens, targets) = whole(model), random_rows(model, 3, 16)
    theirs = twin(model, dict(module.named_parameters()))
    losses = losses_of(module, tokens, pack_documents(lengths), targets)
    expected = torch.zeros_like(losses)
    for row, row_lengths in enumerate(lengths):
        ends = torch.tensor(row_lengths).cumsum(0).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            logits = theirs(tokens[row : row + 1, start:end]).logits[0]
            alone = F.cross_entropy(logits, targets[row, start:end], ignore_index=IGNORE_INDEX, reduction="none")
            expected[row, start:end] = alone
    torch.testing.assert_close(losses, expected, **CLOSE)
    weights = torch.rand(losses.shape)
    assert_gradients_equal(module, theirs, (losses * weights).sum(), (expected * weights).sum())


def assert_gradients_equal(module: nn.Module, theirs: nn.Module, our_loss: Tensor, their_loss: Tensor) -> None:
    """Assert that parameters have transformers' names and gradients."""
    ours, others = dict(module.named_parameters()), dict(theirs.named_parameters())
    assert sorted(ours) == sorted(others)
    actual = torch.autograd.grad(our_loss, list(ours.values()))
    expected = torch.autograd.grad(their_loss, [others[name] for name in ours])
    for name, gradient, reference in zip(ours, actual, expected, strict=True):
        assert gradient.any(), name
        size = max(1.0, reference.abs().max().item())  # sums of many terms round by their size
        torch.testing.assert_close(gradient / size, reference / size, **CLOSE)


def test_rope_scaling_changes_logits(model: Qwen3Dense) -> None:
    """Scaled positions change all logits but the first token's."""
    if model.architecture.rope_scaling is None:
        return
    module, tokens = whole(model), torch.randint(model.vocab_size, (1, 9))
    plain = dense(rope_theta=model.architecture.rope_theta).build(LayerRange(0, 2, embedding=True, head=True))
    plain.load_state_dict(module.state_dict())
    actual, other = (logits_of(model, tokens, one_document(1, 9)) for model in (module, plain))
    assert (actual - other).abs()[:, 1:].amax(-1).min() > 1e-4


@pytest.mark.parametrize("length", [5, 16, 17, 23])
def test_dynamic_positions_equal_those_of_transformers(length: int) -> None:
    """Positions are scaled only in texts longer than max_position_embeddings, and more the longer a text is."""
    model = dense(
        rope_scaling=RopeScaling(rope_type="dynamic", factor=3.0), max_position_embeddings=16, rope_theta=100.0
    )
    module, (tokens, targets) = whole(model), random_rows(model, 2, length)
    theirs = twin(model, dict(module.named_parameters()))
    logits = theirs(tokens).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none").view(2, length)
    losses = losses_of(module, tokens, one_document(2, length), targets)
    torch.testing.assert_close(losses, expected, **CLOSE)
    assert_gradients_equal(module, theirs, losses.sum(), expected.sum())


def test_names_cover_the_model(model: Qwen3Dense) -> None:
    """Every parameter has exactly one Hugging Face name, and each group of the mapper is one parameter."""
    parameters = [name for name, _ in whole(model).named_parameters()]
    mapper = model.hugging_face_mapper()
    assert sorted(parameters) == sorted(mapper.inputs)
    assert len(set(mapper.outputs)) == len(mapper.groups) == len(parameters)


def test_builds_on_the_meta_device() -> None:
    """On the meta device nothing is allocated, and a module materialized from there computes the same."""
    model = dense(tie_word_embeddings=True)
    real = whole(model)
    with torch.device("meta"):
        module = model.build(LayerRange(0, 2, embedding=True, head=True))
    assert all(parameter.is_meta for parameter in (*module.parameters(), *module.buffers()))
    module.to_empty(device="cpu").load_state_dict(real.state_dict())
    tokens = torch.randint(29, (2, 5))
    actual, expected = (logits_of(model, tokens, one_document(2, 5)) for model in (module, real))
    torch.testing.assert_close(actual, expected)


def test_half_precision_runs() -> None:
    """In bfloat16 hidden states stay bfloat16, losses are float32, and every parameter gets a gradient."""
    model = dense()
    module = whole(model).to(torch.bfloat16)
    tokens, targets = random_rows(model, 2, 9)
    losses = losses_of(module, tokens, one_document(2, 9), targets)
    gradients = torch.autograd.grad(losses.sum(), list(module.parameters()))
    assert losses.dtype == torch.float32
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


@attrs.frozen
class FakeTokenizer:
    """A tokenizer with 61 ids."""

    vocab_size: int = 61
    eos_id: int = 60


def with_tokenizer(**changes: Any) -> Qwen3Dense:
    sizes = {key: value for key, value in SIZES.items() if key != "vocab_size"}
    tokenizer: Any = FakeTokenizer()
    return Qwen3Dense(kernels=cpu_kernels(), tokenizer=tokenizer, **(sizes | changes))


def test_vocabulary_size_defaults_to_the_tokenizers() -> None:
    """Without a vocabulary size the model uses the tokenizer's, rounded up on request."""
    assert with_tokenizer().vocab_size == 61
    assert with_tokenizer(vocabulary_multiple=64).vocab_size == 64
    assert with_tokenizer(vocab_size=80).vocab_size == 80


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused() -> None:
    """Ids beyond the vocabulary are refused before they index anything."""
    with pytest.raises(UserError, match="the tokenizer has 61 ids, but the model's vocabulary only 32"):
        with_tokenizer(vocab_size=32).build(LayerRange(0, 2, embedding=True, head=True))


def test_constructor_reads_nothing() -> None:
    """A missing config is an error in use, not in construction."""
    model = Qwen3Dense(kernels=cpu_kernels(), config="/nowhere/config.json")  # type: ignore[arg-type]
    assert model.config is not None


KERNELS: dict[str, dict[str, Any]] = {
    "rms_norm": {"rms_norm": "triton", "add_rms_norm": "triton"},
    "qk_norm_rope": {"qk_norm_rope": "triton"},
    "swiglu": {"swiglu": "triton"},
    "loss with gradients": {"linear_cross_entropy": "triton"},
    "cut loss": {"linear_cross_entropy": "cut"},
}
TRITON = {name: choice for choices in list(KERNELS.values())[:4] for name, choice in choices.items()}


@pytest.mark.parametrize("choices", [*KERNELS.values(), TRITON], ids=[*KERNELS, "all"])
def test_parity_holds_for_every_choice_of_kernels(choices: dict[str, Any]) -> None:
    """Losses and gradients equal transformers' with any kernels."""
    model = dense(kernels=kernels_on(DEVICE, **choices))
    module, (tokens, targets) = whole(model).to(DEVICE), (x.to(DEVICE) for x in random_rows(model, 2, 11))
    theirs = twin(model, dict(module.named_parameters())).to(DEVICE)
    losses = losses_of(module, tokens, to(DEVICE, one_document(2, 11)), targets)
    logits = theirs(tokens).logits.flatten(0, 1)
    expected = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none").view(2, 11)
    torch.testing.assert_close(losses, expected, **CLOSE)
    assert_gradients_equal(module, theirs, losses.sum(), expected.sum())


@pytest.mark.parametrize("choices", [{}, TRITON], ids=["eager", "triton"])
def test_bfloat16_is_as_accurate_as_transformers(choices: dict[str, Any]) -> None:
    """
    With bfloat16 weights and activations, the error of logits against float64 is like transformers' error.

    The error depends on the model's depth, so transformers is the yardstick; a fifth more is allowed, because the two
    round at different points.
    """
    kernels = kernels_on(DEVICE, **choices)
    model = dense(
        kernels=kernels, num_hidden_layers=3, vocab_size=61, hidden_size=64, head_dim=16, intermediate_size=96
    )
    module, tokens = whole(model).to(DEVICE).bfloat16(), torch.randint(61, (2, 40)).to(DEVICE)
    theirs = twin(model, dict(module.named_parameters())).to(DEVICE)
    exact = theirs.double()(tokens).logits
    actual, peer = logits_of(module, tokens, to(DEVICE, one_document(2, 40))), theirs.bfloat16()(tokens).logits
    ours, others = ((logits.double() - exact).norm() / exact.norm() for logits in (actual, peer))
    assert actual.dtype == torch.bfloat16
    assert 1e-4 < ours < 1.2 * others


COMPILED: list[tuple[dict[str, Any], RopeScaling | None]] = [
    (TRITON, RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8)),
    ({}, RopeScaling(rope_type="dynamic", factor=4.0)),  # frequencies by the length of the texts
]


@pytest.mark.parametrize(("choices", "rope"), COMPILED, ids=["triton, yarn", "eager, dynamic"])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does
def test_the_model_compiles_without_graph_breaks(choices: dict[str, Any], rope: RopeScaling | None) -> None:
    """Traced as one graph, the whole model has the same losses and gradients."""
    kernels = kernels_on(DEVICE, **choices)
    model = dense(kernels=kernels, rope_scaling=rope, max_position_embeddings=8, num_hidden_layers=1)
    module, (tokens, targets) = whole(model).to(DEVICE), (x.to(DEVICE) for x in random_rows(model, 2, 11))
    shared = to(DEVICE, one_document(2, 11))
    runs = []
    model.kernels.import_operations()
    for called in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        losses = losses_of(called, tokens, shared, targets)
        runs.append((losses, *torch.autograd.grad(losses.sum(), list(module.parameters()))))
    torch.testing.assert_close(runs[1], runs[0], **CLOSE)
