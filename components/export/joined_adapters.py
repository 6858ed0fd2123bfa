"""Adapters for layers that a family's files join or rename, in the joined layer's form."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.ports.adapters import AdaptedLayer, LowRank
from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.weights.adapted import find_adapted_layers
from drawloom.components.weights.mapper import parallel, return_unchanged, sequential
from drawloom.graph import UserError

PREFIX = "base_model.model."
"""Prefix that PEFT adds to the tensor names of transformers."""

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""PEFT's names of a linear layer's factors, and of DoRA's magnitudes."""


@attrs.frozen(eq=False)
class JoinedLayer:
    """
    Linear layer `name` in a family's files; `group` makes its weight from several layers' weights.

    `parts` are the adapted ones among these layers. Their factors become one pair: in W + scale * B A, A has all parts'
    rows, and B has a part's columns in the part's rows, and zeros elsewhere. `rows` are the row counts of the layers'
    weights.
    """

    name: str
    group: TensorGroup
    parts: Mapping[str, AdaptedLayer]
    rows: Sequence[int]

    @property
    def peft_pair(self) -> LowRank:
        """The factors' description for PEFT. Raises UserError for a part without DoRA beside one with it."""
        pairs = list(self._pairs_by_layer_name.values())
        if any(pair.dora for pair in pairs) and len(pairs) < len(self.rows):
            others = ", ".join(name for name in self._layer_names if name not in self.parts)
            raise UserError(
                f"PEFT has {self.name} as one layer, and DoRA adapts only a part of it; adapt {others}, too"
            )
        return attrs.evolve(pairs[0], target=self.name, rank=sum(pair.rank for pair in pairs))

    @property
    def peft_mapper_joining_parts(self) -> Mapper:
        """Mapper for joining the parts' factors to one pair, with PEFT's tensor names."""
        joins = {A: _join_input_factors, B: self._join_output_factors} | (
            {MAGNITUDE: self._join_magnitudes} if self.peft_pair.dora else {}
        )
        groups = [
            TensorGroup(tuple(f"{PREFIX}{part}.{leaf}" for part in self.parts), (f"{PREFIX}{self.name}.{leaf}",), join)
            for leaf, join in joins.items()
        ]
        return sequential(
            parallel(*(layer.make_mapper_to_peft(name) for name, layer in self.parts.items())), Mapper(tuple(groups))
        )

    @property
    def _layer_names(self) -> list[str]:
        """Names of the layers that make up the joined layer."""
        return [name.removesuffix(".weight") for name in self.group.inputs]

    @property
    def _pairs_by_layer_name(self) -> dict[str, LowRank]:
        """PEFT's factor descriptions for the adapted layers, by layer name."""
        return {name: layer.list_low_rank_pairs(name)[0] for name, layer in self.parts.items()}

    def _join_output_factors(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Join the parts' B, (outputs, rank) per part, to (all outputs, all ranks)."""
        factors, pairs = dict(zip(self.parts, tensors, strict=True)), self._pairs_by_layer_name
        width, scale, start, blocks = self.peft_pair.rank, self.peft_pair.scale, 0, []
        for name, rows in zip(self._layer_names, self.rows, strict=True):
            block = tensors[0].new_zeros(rows, width)
            if name in factors:
                # One scale for all parts: a part with another one has the quotient in its factor.
                block[:, start : start + pairs[name].rank] = factors[name] * (pairs[name].scale / scale)
                start += pairs[name].rank
            blocks.append(block)
        return self.group.convert(blocks)

    def _join_magnitudes(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Join the parts' magnitudes, (outputs,) per part, to (all outputs,)."""
        by_name = dict(zip(self.parts, tensors, strict=True))
        [joined] = self.group.convert([by_name[name].unsqueeze(1) for name in self._layer_names])
        return [joined.squeeze(1)]


def _join_input_factors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Join the parts' A, (rank, inputs) per part, to (all ranks, inputs)."""
    return [torch.cat([*tensors])]


def find_layers_joined_in_files(whole: nn.Module, file_mapper: Mapper) -> Iterator[JoinedLayer]:
    """Yield a whole model's adapted linear layers with another form or name in files; `file_mapper` maps to these."""
    adapted = {
        name: layer
        for name, layer in find_adapted_layers(whole)
        if f"{PREFIX}{name}.{A}" in layer.make_mapper_to_peft(name).outputs
    }
    for group in file_mapper.groups:
        layers = [name.removesuffix(".weight") for name in group.inputs]
        parts = {name: adapted[name] for name in layers if name in adapted}
        if parts and (group.outputs != group.inputs or group.convert is not return_unchanged):
            rows = [len(whole.get_parameter(name)) for name in group.inputs]
            yield JoinedLayer(group.outputs[0].removesuffix(".weight"), group, parts, rows)
