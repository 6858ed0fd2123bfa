"""Models with adapters: frozen parameters, added parameters, and merging into the model's weights."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch
from torch import nn

from drawloom import UserError
from drawloom.components.weights.load import convert_tensors
from drawloom.components.weights.mapper import parallel
from drawloom.ports import Adapter, Fill, LayerRange, LinearLayer, Mapper, Model, ModelParameter, find_adapted_layers

EMBEDDING, HEAD = "model.embed_tokens", "lm_head.weight"
"""Names of the embedding and of an untied head in Hugging Face models."""


def freeze_adapt_and_list_targets(adapters: Sequence[Adapter], module: nn.Module) -> set[str]:
    """
    Add adapters to a module on the meta device, and freeze all parameters they do not train.

    Returns the adapters' target patterns with a match.
    """
    if not adapters:
        return set()
    module.requires_grad_(False)
    return {target for adapter in adapters for target in adapter.adapt_and_list_matched_targets(module)}


def build_meta_model_with_adapters(model: Model, adapters: Sequence[Adapter]) -> nn.Module:
    """Build the whole model with adapters on the meta device. Raises UserError for a pattern that matches nothing."""
    with torch.device("meta"):
        module = model.build(LayerRange.of_whole_model(model.num_hidden_layers))
        layers = [name.rpartition(".")[2] for name, part in module.named_modules() if isinstance(part, LinearLayer)]
        matched = freeze_adapt_and_list_targets(adapters, module)
    for adapter in adapters:
        for target in adapter.targets:
            if target not in matched:
                example = f"; linear layers are {', '.join(dict.fromkeys(layers))}" if layers else ""
                raise UserError(f"adapters: {target!r} matches nothing that can be adapted{example}", exit_code=2)
    return module


@contextmanager
def disable_adapters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run the context with all adapters in the modules switched off, so layers compute with their base weights."""
    layers = [layer for module in modules for _, layer in find_adapted_layers(module)]
    for layer in layers:
        layer.active = False
    try:
        yield
    finally:
        for layer in layers:
            layer.active = True


def materialize_and_initialize_adapters(module: nn.Module, device: torch.device, fill: Fill) -> None:
    """Materialize the adapter parameters with their initial values; all other parameters are already materialized."""
    for name, layer in find_adapted_layers(module):
        for leaf in layer.adapter_parameter_names:
            parameter = getattr(layer, leaf)
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device=device)
                setattr(layer, leaf, nn.Parameter(empty, parameter.requires_grad))
        layer.initialize_adapter(name, fill)


def make_merge_mapper(whole: nn.Module, tied: bool) -> Mapper:
    """
    Return the mapper that merges adapters into plain layers' weights.

    An adapter on a tied embedding leaves the head unchanged: the result has a separate head.
    """
    layers = find_adapted_layers(whole)
    return parallel(
        *(layer.make_merge_mapper(name, HEAD if tied and name == EMBEDDING else None) for name, layer in layers)
    )


@attrs.frozen
class MergeRoundingLoss:
    """Rounding loss in merged weights: squared norms of the adapters' change, and of its part lost by rounding."""

    change: float = 0.0
    lost: float = 0.0

    @property
    def relative_rounding_loss(self) -> float:
        """Norm of the rounding loss, relative to the norm of the change."""
        return (self.lost / self.change) ** 0.5 if self.change else 0.0


def gather_and_measure_rounding_loss(
    mapper: Mapper, parameters: dict[str, ModelParameter], dtype: torch.dtype | None
) -> MergeRoundingLoss:
    """
    Measure the rounding loss of merging adapters into these parameters, in `dtype` or the weights' dtype.

    Slices are gathered: a collective over the ranks with slices.
    """
    error = MergeRoundingLoss()
    for group in mapper.groups:
        if not parameters.keys() >= set(group.inputs):
            continue
        base = parameters[group.inputs[0]]
        wide_parameters = {name: parameters[name].gather_whole().float() for name in group.inputs}
        merged = convert_tensors(Mapper((group,)), wide_parameters)[group.outputs[0]]
        lost = merged - merged.to(dtype or base.dtype).float()
        change = merged - wide_parameters[group.inputs[0]]
        error = MergeRoundingLoss(error.change + float(change.square().sum()), error.lost + float(lost.square().sum()))
    return error
