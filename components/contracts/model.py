"""Contracts for model ports and their kernels."""

import torch

from drawloom.components.ports.cache import KeyValueCache
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import (
    Head,
    Kernels,
    LanguageModel,
    LayerRange,
    Model,
    TokenContext,
    layers_keep_shapes,
)
from drawloom.components.ports.slices import TensorSlice
from drawloom.graph.testing import expect
from drawloom.kernels.attention.options import AttentionOptions

TOLERANCE = 1e-4  # far above the rounding of float32, and far below the error of a wrong formula


def rms_norm_follows_its_formula(kernels: Kernels) -> None:
    """The result is x / sqrt(mean(x²) + eps) * weight, over the last dimension."""
    x, weight = _random_tensor(3, 5, 16), _random_tensor(16)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    _expect_close(kernels.rms_norm(x, weight, 1e-6), wanted)


def swiglu_follows_its_formula(kernels: Kernels) -> None:
    """The result is gate * sigmoid(gate) * up."""
    gate, up = _random_tensor(3, 5, 16), _random_tensor(3, 5, 16)
    _expect_close(kernels.swiglu(gate, up), gate.double() * gate.double().sigmoid() * up.double())


def rope_rotates_pairs_of_channels(kernels: Kernels) -> None:
    """Pairs of channels, from the two halves of a head, are rotated by their angles."""
    x, angles = _random_tensor(2, 5, 3, 8), _random_tensor(2, 5, 4)
    cos, sin = angles.cos().double()[:, :, None], angles.sin().double()[:, :, None]
    first, second = x.double().chunk(2, -1)
    wanted = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    _expect_close(kernels.rope(x, angles.cos(), angles.sin()), wanted)


def attention_is_causal_within_documents(kernels: Kernels) -> None:
    """
    Attention is a softmax over earlier tokens in the same document, and head groups share keys and values.

    The mask for rows of one document (`one_document_per_row`) has the same result.
    """
    q, k, v = _random_tensor(2, 6, 4, 8), _random_tensor(2, 6, 2, 8), _random_tensor(2, 6, 2, 8)
    one = torch.zeros(2, 6, dtype=torch.int64)
    known = kernels.attention_mask(one, one_document_per_row=True)
    _expect_close(kernels.attention(q, k, v, known), kernels.attention(q, k, v, kernels.attention_mask(one)).double())
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    k64, v64 = (x.double().repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("rihd,rjhd->rhij", q.double(), k64) / 8**0.5
    mask = torch.ones(6, 6, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None, :])
    weights = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
    result = kernels.attention(q, k, v, kernels.attention_mask(documents))
    _expect_close(result, torch.einsum("rhij,rjhd->rihd", weights, v64))


def attention_supports_scale_softcap_and_sinks(kernels: Kernels) -> None:
    """
    Scores have a scale and a softcap, sinks are scores for keys without values, and values have any width.

    A mask for whole rows and one for documents have the same result for rows of one document.
    """
    q, k, v, sinks = (
        _random_tensor(2, 6, 4, 8),
        _random_tensor(2, 6, 2, 8),
        _random_tensor(2, 6, 2, 12),
        _random_tensor(4),
    )
    documents = torch.zeros(2, 6, dtype=torch.int64)
    k64, v64 = (x.double().repeat_interleave(2, dim=2) for x in (k, v))
    scores = 2 * torch.tanh(torch.einsum("rihd,rjhd->rhij", q.double(), k64) * 0.3 / 2)
    scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    with_sinks = torch.cat([scores, sinks.double()[None, :, None, None].expand(2, 4, 6, 1)], -1)
    wanted = torch.einsum("rhij,rjhd->rihd", with_sinks.softmax(-1)[..., :-1], v64)
    for one_document_per_row in (False, True):
        mask = kernels.attention_mask(documents, one_document_per_row=one_document_per_row)
        _expect_close(kernels.attention(q, k, v, mask, AttentionOptions(0.3, 2.0), sinks), wanted)


def attention_over_cached_parts_equals_attention_over_the_text(kernels: Kernels) -> None:
    """
    Attention over parts of a text with a key-value cache equals attention over the whole text.

    The last part is a fixed pass, whose keys behind the text are hidden.
    """
    q, k, v, sinks = (
        _random_tensor(2, 6, 4, 8),
        _random_tensor(2, 6, 2, 8),
        _random_tensor(2, 6, 2, 5),
        _random_tensor(4),
    )
    documents, cache, device = torch.zeros(2, 6, dtype=torch.int64), KeyValueCache(9), torch.device("cpu")
    options = AttentionOptions(0.5)
    layers = [(k, None, None), (2 * k, 3, sinks)]  # the second has a window and sinks
    wanted = [
        kernels.attention(q, keys, v, kernels.attention_mask(documents, window), options, sinks)
        for keys, window, sinks in layers
    ]
    for part in (slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6)):
        if part.start == 5:
            cache.begin_fixed_pass(device)
        for whole, (keys, window, layer_sinks) in zip(wanted, layers, strict=True):
            mask = kernels.attention_mask(documents[:, part], window, cache=cache)
            actual = kernels.attention(q[:, part], keys[:, part], v[:, part], mask, options, layer_sinks)
            _expect_close(actual, whole[:, part].double())
        cache.end_pass(part.stop - part.start)


def linear_cross_entropy_is_weighted_negative_log_softmax(kernels: Kernels) -> None:
    """
    The loss is -log softmax(hidden @ weight.T) at the target, times the token's weight; 0 for ignored targets.

    The second result is the logits' log-sum-exp (lse).
    """
    hidden, weight, targets = _random_tensor(3, 4, 8), _random_tensor(11, 8), torch.arange(12).reshape(3, 4) % 11
    targets[0, 1] = -100  # IGNORE_INDEX
    logarithms = (hidden.double() @ weight.double().T).log_softmax(-1)
    wanted = -logarithms.gather(-1, targets.clamp(min=0)[..., None])[..., 0].masked_fill(targets == -100, 0.0)
    token_weights = torch.arange(12.0).reshape(3, 4)
    for argument, factors in ((None, torch.ones(3, 4)), (token_weights, token_weights)):
        losses, lse = kernels.linear_cross_entropy(hidden, weight, targets, argument)
        _expect_close(losses, wanted * factors)
        _expect_close(lse, (hidden.double() @ weight.double().T).logsumexp(-1))


def zero_rows_yield_zero_rows(kernels: Kernels) -> None:
    """A kernel accepts zero rows, and returns zero rows."""
    expect(
        kernels.swiglu(_random_tensor(0, 16), _random_tensor(0, 16)).shape == (0, 16), "zero rows give another shape"
    )


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
    whole = set(_parameter_names_of_layers(model, LayerRange(0, model.num_hidden_layers, True, True)))
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
            name: p.shape for name, p in one.build(LayerRange(0, one.num_hidden_layers, True, True)).named_parameters()
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
    module = model.build(LayerRange(0, model.num_hidden_layers, True, True))
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
    module = model.build(LayerRange(0, model.num_hidden_layers, True, True))
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
