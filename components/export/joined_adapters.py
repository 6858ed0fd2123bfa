"""Adapters of layers that files of a family join or rename, in the form of the joined layer."""

from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor, nn

from drawloom.components.adapters.lora_layers import PEFT, LoraLinear
from drawloom.components.ports.adapters import AdaptedLayer, LowRank
from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.weights.adapted import find_adapted_layers
from drawloom.components.weights.mapper import same
from drawloom.graph import UserError


@attrs.frozen(eq=False)
class JoinedLayer:
    """
    Linear layer `name` of a family's files, with the layers of the model whose weights `group` joins to its weight.

    The low-rank factors of the parts are one pair: W + scale * B A, where A has the rows of all parts, and B has the
    columns of a part in the rows of this part, and zeros elsewhere.
    """

    name: str
    group: TensorGroup
    parts: Mapping[str, LoraLinear]
    rows: Sequence[int]

    @property
    def pair(self) -> LowRank:
        """The description of the factors for PEFT. Raises UserError for a part without DoRA beside one with it."""
        forms = [layer.form for layer in self.parts.values()]
        if any(form.dora for form in forms) and len(self.parts) < len(self.rows):
            others = ", ".join(name for name in self._layers if name not in self.parts)
            raise UserError(
                f"PEFT has {self.name} as one layer, of which a part is adapted with DoRA; adapt {others}, too"
            )
        return attrs.evolve(forms[0].low_rank(self.name), rank=sum(form.rank for form in forms))

    @property
    def mapper(self) -> Mapper:
        """The mapper from the factors of the parts to the factors of the joined layer, under PEFT's names."""
        target = f"{PEFT}{self.name}"
        a, b, magnitude = (
            tuple(f"{name}.{leaf}" for name in self.parts) for leaf in ("lora_A", "lora_B", "lora_magnitude")
        )
        groups = [
            TensorGroup(a, (f"{target}.lora_A.weight",), lambda tensors: [torch.cat([*tensors])]),
            TensorGroup(b, (f"{target}.lora_B.weight",), self._join_columns),
        ]
        if self.pair.dora:
            groups.append(TensorGroup(magnitude, (f"{target}.lora_magnitude_vector",), self._join_magnitudes))
        return Mapper(tuple(groups))

    @property
    def _layers(self) -> list[str]:
        return [name.removesuffix(".weight") for name in self.group.inputs]

    def _join_columns(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Join B of the parts, each (outputs, rank), to (all outputs, all ranks)."""
        factors, forms = dict(zip(self.parts, tensors, strict=True)), [layer.form for layer in self.parts.values()]
        width, start, blocks = sum(form.rank for form in forms), 0, []
        for name, rows in zip(self._layers, self.rows, strict=True):
            block = tensors[0].new_zeros(rows, width)
            if name in factors:
                form, factor = self.parts[name].form, factors[name]
                # One scale for all parts: a part with another one has the quotient in its factor.
                block[:, start : start + form.rank] = factor * (form.scale / forms[0].scale)
                start += form.rank
            blocks.append(block)
        return self.group.convert(blocks)

    def _join_magnitudes(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Join magnitudes of the parts, each (outputs,), to (all outputs,)."""
        by_name = dict(zip(self.parts, tensors, strict=True))
        [joined] = self.group.convert([by_name[name].unsqueeze(1) for name in self._layers])
        return [joined.squeeze(1)]


def joined_layers(whole: nn.Module, mapper: Mapper) -> Iterator[JoinedLayer]:
    """Yield the adapted layers of a whole model that have another form or name in files of its family."""
    adapted: dict[str, AdaptedLayer] = dict(find_adapted_layers(whole))
    for group in mapper.groups:
        layers = [name.removesuffix(".weight") for name in group.inputs]
        parts = {name: layer for name in layers if isinstance(layer := adapted.get(name), LoraLinear)}
        if parts and (group.outputs != group.inputs or group.convert is not same):
            rows = [len(whole.get_parameter(name)) for name in group.inputs]
            yield JoinedLayer(group.outputs[0].removesuffix(".weight"), group, parts, rows)
