"""Contracts of the ports of stages and their parameters."""

import torch
from torch import nn

from drawloom.components.ports.model import TokenContext
from drawloom.components.ports.stages import (
    AveragedWeights,
    Parameters,
    SpreadParameters,
    StageInputs,
    Stages,
    TrainableStages,
    Transform,
    gradient_of,
)
from drawloom.graph.testing import expect


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
    found = inputs.boundary(0, tokens, TokenContext(torch.arange(5).repeat(2, 1), torch.zeros_like(tokens)))
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
