"""Contracts for stage ports and their parameters."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from drawloom.components.ports.model import TokenContext
from drawloom.components.ports.stages import (
    AveragedWeights,
    ModelExport,
    Parameters,
    SpreadParameters,
    StageInputs,
    Stages,
    TrainableStages,
    get_or_create_gradient,
)
from drawloom.graph.testing import expect


def parameters_have_unique_names(parameters: Parameters) -> None:
    """A parameter has one name, the order of parameters does not change, and none is on the meta device."""
    named = parameters.named_parameters()
    expect(named, "there are no parameters")
    expect(len({name for name, _ in named}) == len(named), "two parameters have one name")
    expect(len({id(parameter) for _, parameter in named}) == len(named), "a parameter has two names")
    expect([name for name, _ in parameters.named_parameters()] == [name for name, _ in named], "the order changes")
    for name, parameter in named:
        expect(
            isinstance(parameter, nn.Parameter) and not parameter.is_meta,
            f"{name} is on the meta device, or not an nn.Parameter",
        )


def stages_are_ordered_and_not_on_the_meta_device(stages: Stages) -> None:
    """This rank has ordered stages with the same count, and their modules are not on the meta device."""
    numbers = [stage.index for stage in stages.local]
    expect(numbers and numbers == sorted(set(numbers)), f"this rank's stages are {numbers}")
    expect(len({stage.count for stage in stages.local}) == 1, "stages disagree on how many there are")
    for stage in stages.local:
        expect(0 <= stage.index < stage.count, f"stage {stage.index} is not below the count {stage.count}")
        expect(
            not any(parameter.is_meta for parameter in stage.module.parameters()),
            f"stage {stage.index} is on the meta device",
        )


def averages_do_not_change_while_they_replace_weights(average: AveragedWeights) -> None:
    """Averages do not change while they replace the weights or afterwards, even if their user fails."""
    before = {name: tensor.clone() for name, tensor in average.averages().items()}
    for fails in (False, True):
        try:
            with average.use_averages():
                for name, tensor in average.averages().items():
                    expect(torch.equal(tensor, before[name]), f"the average of {name} changes when it is used")
                if fails:
                    raise InterruptedError
        except InterruptedError:
            pass
        after = average.averages()
        has_same_names = before.keys() == after.keys()
        is_same = has_same_names and all(torch.equal(after[name], tensor) for name, tensor in before.items())
        expect(is_same, "averages change when they are used")


def owned_parameters_are_a_subset(parameters: SpreadParameters) -> None:
    """The parameters that count on a rank are a subsequence of its named parameters."""
    named = [id(parameter) for _, parameter in parameters.named_parameters()]
    owned = [id(parameter) for _, parameter in parameters.owned_parameters()]
    expect(
        [key for key in named if key in owned] == owned,
        "owned_parameters() lists other names than named_parameters(), or reorders them",
    )


def gradients_are_summed_over_ranks(parameters: SpreadParameters) -> None:
    """A gradient of ones becomes the number of ranks with the parameter."""
    for _, parameter in parameters.named_parameters():
        get_or_create_gradient(parameter).fill_(1)
    parameters.sum_remaining_gradients()
    for name, parameter in parameters.named_parameters():
        gradient = get_or_create_gradient(parameter)
        ranks = float(gradient.flatten()[0])
        expect(ranks >= 1 and ranks.is_integer(), f"the gradients of {name}, ones on each rank, add up to {ranks}")
        expect(bool((gradient == ranks).all()), f"the gradient of {name} is summed in part")


def layers_use_changed_master_weights(stages: TrainableStages) -> None:
    """Casting does not change master weights; after an in-place change to a master weight, layers use the new value."""
    for only_if_changed in (False, True):
        masters = [parameter for stage in stages.local for _, parameter in stage.named_masters_or_parameters()]
        before = [parameter.detach().clone() for parameter in masters]
        stages.cast_weights(only_if_changed)
        expect(all(map(torch.equal, masters, before)), "casting changes a parameter")
        with torch.no_grad():
            for parameter in {id(parameter): parameter for parameter in masters}.values():
                parameter.add_(1)
        stages.cast_weights(only_if_changed)
        for stage in stages.local:
            compute = dict(stage.module.named_parameters())
            for name, parameter in stage.named_masters_or_parameters():
                is_same = torch.equal(compute[name], parameter.to(compute[name].dtype))
                expect(is_same, f"after a change of {name} layers still compute with the old one")


def compute_gradients_become_master_gradients(stages: TrainableStages) -> None:
    """Gradients of compute weights become gradients of master weights."""
    for stage in stages.local:
        for parameter in stage.module.parameters():
            get_or_create_gradient(parameter).fill_(1)
    stages.move_gradients_to_masters()
    for stage in stages.local:
        for name, parameter in stage.named_masters_or_parameters():
            expect(parameter.grad is not None, f"{name} gets no gradient")
            expect(bool((get_or_create_gradient(parameter) == 1).all()), f"the gradient of {name} is changed")


def first_stage_input_is_a_meta_tensor_like_tokens(inputs: StageInputs) -> None:
    """The first stage's input is a meta tensor with the tokens' shape and dtype."""
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    spec = inputs.infer_stage_inputs(0, tokens, TokenContext(torch.arange(5).repeat(2, 1), torch.zeros_like(tokens)))
    expect(isinstance(spec, torch.Tensor) and spec.is_meta, "the input of the first stage is not on the meta device")
    expect(
        (spec.shape, spec.dtype) == (tokens.shape, tokens.dtype),
        f"the first stage takes {spec.dtype} {tuple(spec.shape)} for tokens {tokens.dtype} {tuple(tokens.shape)}",
    )


def an_exported_folder_has_a_config_and_weights(export: ModelExport) -> None:
    """An export has config.json and safetensors files."""
    with tempfile.TemporaryDirectory(prefix="drawloom-contract-") as folder:
        export.gather_and_export_to(Path(folder) / "model")
        files = {path.name for path in (Path(folder) / "model").iterdir()}
    expect("config.json" in files, f"an export has no config.json, and {', '.join(sorted(files))}")
    expect(any(name.endswith(".safetensors") for name in files), "an export has no safetensors file")
