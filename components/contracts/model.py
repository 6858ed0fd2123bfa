"""Contracts of the ports of models, their kernels and their parameters."""

import torch
from torch import nn

from drawloom.components.ports.cache import KeyValueCache
from drawloom.components.ports.data import IGNORE_INDEX
from drawloom.components.ports.model import (
    AveragedWeights,
    BatchContext,
    Head,
    Kernels,
    LayerRange,
    Model,
    Parameters,
    SpreadParameters,
    StageInputs,
    Stages,
    TrainableStages,
    Transform,
    gradient_of,
)
from drawloom.components.ports.slices import TensorSlice
from drawloom.graph.testing import expect

CLOSE = 1e-4  # far above the rounding of float32, and far below the error of a wrong formula


def rms_norm(kernels: Kernels) -> None:
    """x / sqrt(mean(x²) + eps) * weight, over the last dimension."""
    x, weight = _random(3, 5, 16), _random(16)
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    _expect_close(kernels.rms_norm(x, weight, 1e-6), wanted)


def swiglu(kernels: Kernels) -> None:
    """gate * sigmoid(gate) * up."""
    gate, up = _random(3, 5, 16), _random(3, 5, 16)
    _expect_close(kernels.swiglu(gate, up), gate.double() * gate.double().sigmoid() * up.double())


def rope(kernels: Kernels) -> None:
    """Each pair of channels, one of either half of a head, is rotated by its angle."""
    x, angles = _random(2, 5, 3, 8), _random(2, 5, 4)
    cos, sin = angles.cos().double()[:, :, None], angles.sin().double()[:, :, None]
    first, second = x.double().chunk(2, -1)
    wanted = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    _expect_close(kernels.rope(x, angles.cos(), angles.sin()), wanted)


def attention(kernels: Kernels) -> None:
    """
    Softmax over earlier tokens of the same document, with groups of heads that share keys and values.

    The same if it is known that each row is one document.
    """
    q, k, v = _random(2, 6, 4, 8), _random(2, 6, 2, 8), _random(2, 6, 2, 8)
    one = torch.zeros(2, 6, dtype=torch.int64)
    known = kernels.attention_mask(one, whole_rows=True)
    _expect_close(kernels.attention(q, k, v, known), kernels.attention(q, k, v, kernels.attention_mask(one)).double())
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]])
    k64, v64 = (x.double().repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("rihd,rjhd->rhij", q.double(), k64) / 8**0.5
    seen = torch.ones(6, 6, dtype=torch.bool).tril() & (documents[:, :, None] == documents[:, None, :])
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    found = kernels.attention(q, k, v, kernels.attention_mask(documents))
    _expect_close(found, torch.einsum("rhij,rjhd->rihd", weights, v64))


def attention_with_a_cache(kernels: Kernels) -> None:
    """A text in parts, each layer of which extends the cache, has the attention of the whole text."""
    q, k, v = _random(2, 6, 4, 8), _random(2, 6, 2, 8), _random(2, 6, 2, 8)
    documents, cache = torch.zeros(2, 6, dtype=torch.int64), KeyValueCache(9)
    layers = [(k, None), (2 * k, 3)]  # the second has a window
    wanted = [kernels.attention(q, keys, v, kernels.attention_mask(documents, window)) for keys, window in layers]
    for part in (slice(0, 3), slice(3, 5), slice(5, 6)):
        for whole, (keys, window) in zip(wanted, layers, strict=True):
            mask = kernels.attention_mask(documents[:, part], window, cache=cache)
            _expect_close(kernels.attention(q[:, part], keys[:, part], v[:, part], mask), whole[:, part].double())
        cache.advance(part.stop - part.start)


def linear_cross_entropy(kernels: Kernels) -> None:
    """-log softmax(hidden @ weight.T) at the target, 0 where it is ignored, times the token's weight; and the lse."""
    hidden, weight, targets = _random(3, 4, 8), _random(11, 8), torch.arange(12).reshape(3, 4) % 11
    targets[0, 1] = -100  # IGNORE_INDEX
    logarithms = (hidden.double() @ weight.double().T).log_softmax(-1)
    wanted = -logarithms.gather(-1, targets.clamp(min=0)[..., None])[..., 0].masked_fill(targets == -100, 0.0)
    token_weights = torch.arange(12.0).reshape(3, 4)
    for given, factors in ((None, torch.ones(3, 4)), (token_weights, token_weights)):
        losses, lse = kernels.linear_cross_entropy(hidden, weight, targets, given)
        _expect_close(losses, wanted * factors)
        _expect_close(lse, (hidden.double() @ weight.double().T).logsumexp(-1))


def zero_rows_are_fine(kernels: Kernels) -> None:
    """Zero rows give zero rows."""
    expect(kernels.swiglu(_random(0, 16), _random(0, 16)).shape == (0, 16), "zero rows give another shape")


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _expect_close(given: torch.Tensor, wanted: torch.Tensor) -> None:
    expect(given.shape == wanted.shape, f"the shape is {tuple(given.shape)}, not {tuple(wanted.shape)}")
    error = float((given.detach().double() - wanted.detach()).abs().max())
    expect(error < CLOSE, f"the largest error is {error:.2g}")


def _names(model: Model, span: LayerRange) -> list[str]:
    with torch.device("meta"):
        return [name for name, _ in model.build(span).named_parameters()]


def parts_make_the_whole(model: Model) -> None:
    """Whatever the partition of the layers, parameters have the same names, and each is in some part."""
    whole = set(_names(model, LayerRange(0, model.num_hidden_layers, True, True)))
    for cut in range(1, model.num_hidden_layers):
        first = _names(model, LayerRange(0, cut, True, False))
        last = _names(model, LayerRange(cut, model.num_hidden_layers, False, True))
        expect(set(first) | set(last) == whole, f"split before layer {cut}, some parameters have other names")


def layers_that_keep_shapes_do(model: Model) -> None:
    """If a model says that layers give hidden states of the shape and dtype that they take, each does."""
    if not getattr(model, "layers_keep_shapes", False):
        return
    tokens = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    shared = BatchContext(torch.zeros_like(tokens), torch.zeros_like(tokens))
    with torch.device("meta"), torch.no_grad():
        first = model.build(LayerRange(0, 1, True, False))(tokens, shared)
        for number in range(1, model.num_hidden_layers):
            given = model.build(LayerRange(number, number + 1, False, False))(first, shared)
            found, wanted = (f"{each.dtype} {tuple(each.shape)}" for each in (given, first))
            expect(found == wanted, f"layer {number} gives {found}, and takes {wanted}")


def values_follow_from_name_shape_and_seed(one: Model, other: Model) -> None:
    """Initial values are the same for any instance and slice, and others with another seed."""
    with torch.device("meta"):
        shapes = {
            name: p.shape for name, p in one.build(LayerRange(0, one.num_hidden_layers, True, True)).named_parameters()
        }
    differ = False
    for name, shape in shapes.items():
        first, again, otherwise = torch.empty(shape), torch.empty(shape), torch.empty(shape)
        one.initialise(name, first, 1)
        other.initialise(name, again, 1)
        other.initialise(name, otherwise, 2)
        expect(torch.equal(first, again), f"{name} has other initial values in a second model with the same settings")
        last = torch.empty_like(first[len(first) // 2 :])
        offsets = len(first) - len(last), *(0 for _ in shape[1:])
        one.initialise(name, last, 1, TensorSlice(tuple(shape), offsets, tuple(last.shape)))
        expect(torch.equal(first[-len(last) :], last), f"a slice of {name} has other initial values than the whole")
        expect(torch.isfinite(first).all(), f"{name} has initial values that are not finite")
        differ |= not torch.equal(first, otherwise)
    expect(differ, "the seed changes nothing")


def its_head_is_for_losses(model: Model) -> None:
    """`finish` gets hidden states and a head, whose losses, means and chunks are those of its logits."""
    module = model.build(LayerRange(0, model.num_hidden_layers, True, True))
    for name, parameter in module.named_parameters():
        model.initialise(name, parameter.data, 1)
    tokens = torch.arange(10).reshape(2, 5) % model.vocab_size
    targets = (tokens + 1) % model.vocab_size
    targets[0, 1] = IGNORE_INDEX
    shared = BatchContext(torch.arange(5).repeat(2, 1), torch.zeros_like(tokens))

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


def a_text_in_parts_is_the_whole_text(model: Model) -> None:
    """With a key-value cache, if the model uses one, hidden states are those of a pass over the whole text."""
    module = model.build(LayerRange(0, model.num_hidden_layers, True, True))
    for name, parameter in module.named_parameters():
        model.initialise(name, parameter.data, 1)
    tokens, positions = torch.arange(6)[None] % model.vocab_size, torch.arange(6)[None]
    documents, cache = torch.zeros_like(tokens), KeyValueCache(6)
    with torch.no_grad():
        whole = module(tokens, BatchContext(positions, documents))
        for part in (slice(0, 3), slice(3, 5), slice(5, 6)):
            found = module(tokens[:, part], BatchContext(positions[:, part], documents[:, part], cache=cache))
            if not cache.layers:
                return
            cache.advance(part.stop - part.start)
            _expect_close(found, whole[:, part].double())


def each_is_named_once(parameters: Parameters) -> None:
    """Every parameter has one name, in the same order each time; none is on the meta device."""
    named = parameters.named()
    expect(named, "there are no parameters")
    expect(len({name for name, _ in named}) == len(named), "two parameters have one name")
    expect(len({id(parameter) for _, parameter in named}) == len(named), "a parameter has two names")
    expect([name for name, _ in parameters.named()] == [name for name, _ in named], "the order changes")
    for name, parameter in named:
        expect(
            isinstance(parameter, nn.Parameter) and not parameter.is_meta,
            f"{name} is on the meta device, or no nn.Parameter",
        )


def stages_are_real_and_in_order(stages: Stages) -> None:
    """This rank has stages, in order, all with the same count, with modules off the meta device."""
    numbers = [stage.index for stage in stages.local]
    expect(numbers and numbers == sorted(set(numbers)), f"this rank's stages are {numbers}")
    expect(len({stage.count for stage in stages.local}) == 1, "stages disagree on how many there are")
    for stage in stages.local:
        expect(0 <= stage.index < stage.count, f"stage {stage.index} is not below the count {stage.count}")
        expect(
            not any(parameter.is_meta for parameter in stage.module.parameters()),
            f"stage {stage.index} is on the meta device",
        )


def averages_stay_when_they_are_used(average: AveragedWeights) -> None:
    """In place of the weights and afterwards averages are what they were, also if what uses them fails."""
    before = {name: each.clone() for name, each in average.averages().items()}
    for fails in (False, True):
        try:
            with average.swapped():
                for name, each in average.averages().items():
                    expect(torch.equal(each, before[name]), f"the average of {name} changes when it is used")
                if fails:
                    raise InterruptedError
        except InterruptedError:
            pass
        after = average.averages()
        same = before.keys() == after.keys() and all(torch.equal(after[name], each) for name, each in before.items())
        expect(same, "averages change when they are used")


def counted_are_among_the_named(parameters: SpreadParameters) -> None:
    """The parameters that count on a rank are some of those that it holds, each once, in their order."""
    held = [id(parameter) for _, parameter in parameters.named()]
    counted = [id(parameter) for _, parameter in parameters.counted()]
    expect([each for each in held if each in counted] == counted, "counted() lists others than named(), or reorders")


def gradients_are_summed_over_ranks(parameters: SpreadParameters) -> None:
    """A gradient of ones becomes the number of ranks that hold the parameter; where one rank holds it, it stays."""
    for _, parameter in parameters.named():
        gradient_of(parameter).fill_(1)
    parameters.sum_gradients()
    for name, parameter in parameters.named():
        gradient = gradient_of(parameter)
        ranks = float(gradient.flatten()[0])
        expect(ranks >= 1 and ranks.is_integer(), f"the gradients of {name}, ones on each rank, add up to {ranks}")
        expect(bool((gradient == ranks).all()), f"the gradient of {name} is summed in part")


def casts_follow_the_parameters(stages: TrainableStages) -> None:
    """Casting changes no parameter that the optimizer keeps; after a change of it in place, modules use the new one."""
    for only_if_changed in (False, True):
        kept = [(*each, each[1].detach().clone()) for stage in stages.local for each in stage.named_parameters()]
        stages.cast_weights(only_if_changed)
        expect(all(torch.equal(parameter, before) for _, parameter, before in kept), "casting changes a parameter")
        with torch.no_grad():
            for _, parameter in {id(each[1]): each[:2] for each in kept}.values():
                parameter.add_(1)
        stages.cast_weights(only_if_changed)
        for stage in stages.local:
            used = dict(stage.module.named_parameters())
            for name, parameter in stage.named_parameters():
                same = torch.equal(used[name], parameter.to(used[name].dtype))
                expect(same, f"after a change of {name} layers still compute with the old one")


def gradients_are_handed_over(stages: TrainableStages) -> None:
    """Gradients of what layers compute with become those of the parameters that the optimizer keeps."""
    for stage in stages.local:
        for parameter in stage.module.parameters():
            gradient_of(parameter).fill_(1)
    stages.hand_over_gradients()
    for stage in stages.local:
        for name, parameter in stage.named_parameters():
            expect(parameter.grad is not None, f"{name} gets no gradient")
            expect(bool((gradient_of(parameter) == 1).all()), f"the gradient of {name} is changed")


def the_first_stage_takes_tokens(inputs: StageInputs) -> None:
    """What the first stage takes is a tensor on the meta device with the shape and dtype of the tokens."""
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    found = inputs.boundary(0, tokens, BatchContext(torch.arange(5).repeat(2, 1), torch.zeros_like(tokens)))
    expect(isinstance(found, torch.Tensor) and found.is_meta, "what the first stage takes is not on the meta device")
    expect(
        (found.shape, found.dtype) == (tokens.shape, tokens.dtype),
        f"the first stage takes {found.dtype} {tuple(found.shape)} for tokens {tokens.dtype} {tuple(tokens.shape)}",
    )


def transformed_modules_stay_on_the_meta_device(transform: Transform) -> None:
    """A transformed module is still on the meta device, where all stages are built, and has a new name for none."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
    before = {name for name, _ in module.named_parameters()}
    made = transform.transform(module)
    expect(isinstance(made, nn.Module), f"the transform gives a {type(made).__name__}, and no nn.Module")
    after = dict(made.named_parameters())
    expect(all(parameter.is_meta for parameter in after.values()), "a parameter is made real before its stage is")
    lost = sorted(before - after.keys())
    expect(not lost, f"the parameters {', '.join(lost)} are called otherwise, so that no checkpoint fits")


def transformed_modules_keep_their_shapes(transform: Transform) -> None:
    """A transformed module gives outputs of the same shape."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))
        found = transform.transform(module)(torch.empty(3, 8))
    expect(tuple(found.shape) == (3, 8), f"the transformed module gives {tuple(found.shape)} instead of (3, 8)")
