"""Layers with low-rank adapters, beside PEFT and beside the merged weights."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drawloom.components.adapters.lora_layers import LoraLinear, LoraOptions, compute_dora_scale
from drawloom.components.model.layers import Linear
from drawloom.components.pipeline.split_backward.split_backward import SplitBackward
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.weights.adapted import build_meta_model_with_adapters, make_merge_mapper
from drawloom.components.weights.load import convert_tensors
from support.adapted import adapt, fill_from_seed, lora
from support.qwen3 import cpu_kernels, dense, logits_of, losses_of, one_document, sparse

ALL = ["*_proj", "embed_tokens", "lm_head"]


def layer(**options: Any) -> LoraLinear:
    """Return a linear layer of 6 inputs and 5 outputs, with random weights and factors."""
    torch.manual_seed(1)
    made = LoraLinear(
        Linear(6, 5, cpu_kernels()).requires_grad_(False), LoraOptions(**({"rank": 2, "scale": 0.7} | options))
    )
    for parameter in made.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return made


@pytest.mark.parametrize("dora", [False, True])
def test_outputs_and_gradients_equal_peft(dora: bool) -> None:
    """A linear layer, with and without DoRA, has PEFT's outputs and adapter gradients in float32."""
    import peft  # takes seconds

    ours = layer(dora=dora).double()
    base = nn.Sequential(nn.Linear(6, 5, bias=False, dtype=torch.float64))
    alpha: Any = 1.4
    config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["0"], use_dora=dora)
    theirs: Any = peft.get_peft_model(base, config).double()
    twin = theirs.base_model.model[0]
    pairs = {"lora_A": twin.lora_A.default.weight, "lora_B": twin.lora_B.default.weight}
    pairs |= {"lora_magnitude": twin.lora_magnitude_vector.default.weight} if dora else {}
    with torch.no_grad():
        twin.base_layer.weight.copy_(ours.weight)
        for name, parameter in pairs.items():
            parameter.copy_(getattr(ours, name))
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    y, wanted = ours(x), theirs(x)
    torch.testing.assert_close(y, wanted, rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(y.square().sum(), [getattr(ours, name) for name in pairs])
    for grad, other in zip(grads, torch.autograd.grad(wanted.square().sum(), list(pairs.values())), strict=True):
        torch.testing.assert_close(grad, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dora", [False, True])
def test_a_new_adapter_changes_no_output(dora: bool) -> None:
    """Before the first step an adapter changes nothing, and A has the variance of PEFT's."""
    ours = LoraLinear(Linear(300, 5, cpu_kernels()).requires_grad_(False), LoraOptions(8, 1.0, dora=dora))
    ours.initialize_adapter("layer", fill_from_seed(3))
    x = torch.randn(2, 300)
    torch.testing.assert_close(ours(x), Linear.forward(ours, x), rtol=1e-6, atol=1e-6)
    assert float(ours.lora_A.detach().var()) == pytest.approx(1 / (3 * 300), rel=0.1)


def test_dropout_is_for_passes_with_gradients() -> None:
    """
    Dropout zeroes inputs of A in training, rescales the rest, and changes neither evaluation nor the product with W.
    """
    ours = layer(dropout=0.5)
    x = torch.ones(4000, 6)
    plain = Linear.forward(ours, x)
    with torch.no_grad():
        whole = ours(x)
        assert torch.equal(whole, ours(x)) and float((whole - plain).abs().min()) > 0.1
    noisy = ours(x)
    assert not torch.equal(noisy, whole)
    torch.testing.assert_close(noisy.mean(0), whole.mean(0), rtol=0.05, atol=0.05)


KINDS: dict[str, Any] = {
    "dense": lambda: (dense(), [lora(*ALL)]),
    "dora": lambda: (dense(), [lora("*_proj", "lm_head", dora=True)]),
    "tied": lambda: (dense(tie_word_embeddings=True), [lora("embed_tokens", "q_proj")]),
    "experts": lambda: (sparse(), [lora("experts", "q_proj", rslora=True)]),
    "one part of the experts": lambda: (sparse(), [lora("experts.down_proj")]),
}


def inputs(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets, (2, 7), with one ignored target."""
    tokens = torch.arange(14).view(2, 7) % vocab_size
    targets = tokens.roll(-1, 1).clone()
    targets[1, 2] = IGNORE_INDEX
    return tokens, targets


@pytest.mark.parametrize("kind", KINDS)
def test_split_backward_equals_a_full_backward(kind: str) -> None:
    """Input gradients first and adapter gradients later equal one backward pass; frozen weights get none."""
    model, adapters = KINDS[kind]()
    module = adapt(model, *adapters).double()
    tokens, targets = inputs(model.vocab_size)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    wanted = torch.autograd.grad(
        losses_of(module, tokens, one_document(2, 7), targets).sum(), list(trained.values()), allow_unused=True
    )
    split = SplitBackward()
    with split.forward_context():
        loss = losses_of(module, tokens, one_document(2, 7), targets).sum()
    split.backward_input([loss], None, [])
    assert all(parameter.grad is None for parameter in module.parameters())
    split.backward_weight()
    for (name, parameter), grad in zip(trained.items(), wanted, strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, grad)
    others = [parameter for name, parameter in module.named_parameters() if name not in trained]
    assert others and all(parameter.grad is None for parameter in others)
    assert all(grad is not None and bool(grad.any()) for grad in wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_compute_the_same(kind: str) -> None:
    """
    A model without adapters, filled with the merged weights, has the adapted model's logits; a tied head is untied.
    """
    model, adapters = KINDS[kind]()
    module = adapt(model, *adapters)
    tied = kind == "tied"
    whole = build_meta_model_with_adapters(model, adapters)
    parameters = dict(module.named_parameters())
    merged = convert_tensors(make_merge_mapper(whole, tied), parameters)
    plain = KINDS[kind]()[0] if not tied else dense(tie_word_embeddings=False)
    twin = adapt(plain)
    names = [name for name, _ in twin.named_parameters()]
    twin.load_state_dict({name: merged.get(name, parameters.get(name)) for name in names})
    tokens, _ = inputs(model.vocab_size)
    torch.testing.assert_close(
        logits_of(twin, tokens, one_document(2, 7)), logits_of(module, tokens, one_document(2, 7)), rtol=1e-4, atol=1e-5
    )


def test_the_head_of_an_adapted_layer_gives_losses_of_its_logits() -> None:
    """
    Losses and log-sum-exps, weighted and with ignored targets, are computed from the logits in chunks of any size.
    """
    module = adapt(dense(), lora("lm_head"))
    tokens, targets = inputs(29)
    shared, weights = one_document(2, 7), torch.rand(2, 7)

    def finish(hidden: Tensor, head: Any) -> None:
        logits = head.logits(hidden).double()
        losses, lse = head.token_losses(hidden, targets, weights)
        wanted = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(2, 7)
        torch.testing.assert_close(losses.double(), wanted * weights, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(head.mean_logits(hidden).double(), logits.mean(-1), rtol=1e-4, atol=1e-5)

    module(tokens, shared, finish)


def test_the_scale_is_magnitude_by_norm_of_the_changed_row() -> None:
    """
    The scale divides by the norm of W + scale * B A without computing it; its gradient goes to the magnitude alone.
    """
    torch.manual_seed(0)
    w, a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 7), (2, 7), (5, 2)))
    magnitude = torch.rand(5, dtype=torch.float64, requires_grad=True)
    scale = compute_dora_scale(w, a, b, 0.3, magnitude)
    torch.testing.assert_close(scale, magnitude / (w + 0.3 * b @ a).norm(dim=1))
    assert [grad is not None for grad in torch.autograd.grad(scale.sum(), [w, a, b, magnitude], allow_unused=True)] == [
        False,
        False,
        False,
        True,
    ]
