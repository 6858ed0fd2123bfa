"""Contracts for model ports and their kernels."""

import math

import torch

from drawloom.graph.testing import expect
from drawloom.ports import (
    IGNORE_INDEX,
    CountsFlops,
    Head,
    KeyValueCache,
    LanguageModel,
    LayerRange,
    Model,
    TensorSlice,
    TokenContext,
    layers_keep_shapes,
)

TOLERANCE = 1e-4  # far above the rounding of float32, and far below the error of a wrong formula


def _random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _expect_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    expect(actual.shape == expected.shape, f"the shape is {tuple(actual.shape)}, not {tuple(expected.shape)}")
    error = float((actual.detach().double() - expected.detach()).abs().max())
    expect(error < TOLERANCE, f"the largest error is {error:.2g}")


def _parameter_names_of_layers(model: Model, span: LayerRange) -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in model.build(span).named_parameters()]


def layer_ranges_together_have_all_parameters(model: Model) -> None:
    """However the layers are partitioned, the parts have all the whole model's parameters, under the same names."""
    whole = set(_parameter_names_of_layers(model, LayerRange.of_whole_model(model.num_hidden_layers)))
    for cut in range(1, model.num_hidden_layers):
        first = _parameter_names_of_layers(model, LayerRange(0, cut, True, False))
        last = _parameter_names_of_layers(model, LayerRange(cut, model.num_hidden_layers, False, True))
        expect(set(first) | set(last) == whole, f"split before layer {cut}, some parameters have other names")


def layers_keep_shape_and_dtype_if_declared(model: LanguageModel) -> None:
    """If a model declares that layers keep the hidden states' shape and dtype, every layer keeps them."""
    if not layers_keep_shapes(model):
        return
    tokens = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    shared = TokenContext(torch.zeros_like(tokens), torch.zeros_like(tokens))
    with torch.device("meta"), torch.no_grad():
        first = model.build(LayerRange(0, 1, True, False))(tokens, shared)
        for number in range(1, model.num_hidden_layers):
            hidden = model.build(LayerRange(number, number + 1, False, False))(first, shared)
            output, accepted = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (hidden, first))
            expect(output == accepted, f"layer {number} gives {output}, and takes {accepted}")


def initial_values_depend_only_on_name_shape_and_seed(one: Model, other: Model) -> None:
    """Initial values are equal in all instances and slices, and differ with the seed."""
    with torch.device("meta"):
        shapes = {
            name: p.shape for name, p in one.build(LayerRange.of_whole_model(one.num_hidden_layers)).named_parameters()
        }
    differ = False
    for name, shape in shapes.items():
        first, again, otherwise = torch.empty(shape), torch.empty(shape), torch.empty(shape)
        one.initialize_parameter(name, first, 1)
        other.initialize_parameter(name, again, 1)
        other.initialize_parameter(name, otherwise, 2)
        expect(torch.equal(first, again), f"{name} has other initial values in a second model with the same settings")
        last = torch.empty_like(first[len(first) // 2 :])
        offsets = len(first) - len(last), *(0 for _ in shape[1:])
        one.initialize_parameter(name, last, 1, TensorSlice(tuple(shape), offsets, tuple(last.shape)))
        expect(torch.equal(first[-len(last) :], last), f"a slice of {name} has other initial values than the whole")
        expect(torch.isfinite(first).all(), f"{name} has initial values that are not finite")
        differ |= not torch.equal(first, otherwise)
    expect(differ, "the seed changes nothing")


def head_losses_agree_with_its_logits(model: LanguageModel) -> None:
    """`finish` gets hidden states and a head; the head's losses, means and chunks agree with its logits."""
    module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    for name, parameter in module.named_parameters():
        model.initialize_parameter(name, parameter.data, 1)
    tokens = torch.arange(10).reshape(2, 5) % model.vocab_size
    targets = (tokens + 1) % model.vocab_size
    targets[0, 1] = IGNORE_INDEX
    shared = TokenContext(torch.arange(5).repeat(2, 1), torch.zeros_like(tokens))

    def finish(hidden: torch.Tensor, head: Head) -> str:
        expect(hidden.shape[:2] == (2, 5), f"hidden states have the shape {tuple(hidden.shape)}")
        logits = head.logits(hidden).double()
        expect(logits.shape == (2, 5, model.vocab_size), f"logits have the shape {tuple(logits.shape)}")
        losses, lse = head.token_losses(hidden, targets)
        wanted = logits.logsumexp(-1) - logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        _expect_close(losses, wanted.masked_fill(targets == IGNORE_INDEX, 0.0))
        _expect_close(lse, logits.logsumexp(-1))
        _expect_close(head.mean_logits(hidden), logits.mean(-1))
        picked = head.map_logits(lambda part, ids: part.gather(-1, ids[:, None])[:, 0], hidden, tokens, max_bytes=1)
        _expect_close(picked, logits.gather(-1, tokens[..., None])[..., 0])
        return "finished"

    expect(module(tokens, shared, finish) == "finished", "the module does not give what `finish` does")


def hidden_states_of_cached_parts_equal_the_whole_texts(model: LanguageModel) -> None:
    """Hidden states for parts with a key-value cache, if the model uses it, equal the whole text's."""
    module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
    for name, parameter in module.named_parameters():
        model.initialize_parameter(name, parameter.data, 1)
    tokens, positions = torch.arange(6)[None] % model.vocab_size, torch.arange(6)[None]
    documents, cache = torch.zeros_like(tokens), KeyValueCache(6)
    with torch.no_grad():
        whole = module(tokens, TokenContext(positions, documents))
        for part in (slice(0, 3), slice(3, 5), slice(5, 6)):
            hidden = module(tokens[:, part], TokenContext(positions[:, part], documents[:, part], cache=cache))
            if not cache.cached_layer_count:
                return
            cache.end_pass(part.stop - part.start)
            _expect_close(hidden, whole[:, part].double())


def flops_are_positive_and_finite(model: CountsFlops) -> None:
    """Parameters that multiply a token, and attention, take a positive and finite number of operations."""
    flops = model.forward_flops()
    expect(bool(flops.by_parameter), "no parameter takes an operation")
    for name, count in (*flops.by_parameter.items(), *flops.per_pair.items()):
        expect(0 < count < math.inf, f"{name} takes {count} operations")
    expect(0 <= flops.per_token < math.inf, f"a token takes {flops.per_token} operations beside parameters")


def frozen_parameters_cost_two_of_three_products(model: CountsFlops) -> None:
    """A step without gradients of weights computes two of three matrix products."""
    flops = model.forward_flops()
    pairs = dict.fromkeys(flops.per_pair, 0)
    both = flops.count_training_flops(1, pairs), flops.count_training_flops(1, pairs, flops.by_parameter.keys())
    trained, frozen = (count - 3 * flops.per_token for count in both)
    expect(math.isclose(3 * frozen, 2 * trained), f"{frozen} operations with frozen weights, {trained} with trained")
