"""Source that stacks experts with tensors of their own."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import attrs
import torch
from torch import Tensor

from drawloom.components.storage.tensor_source import TensorSource, TensorSpec

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Projections of one expert by the stacked projection."""


@attrs.frozen(slots=False)
class StackedExperts:
    """
    Source in which `X.experts.gate_up_proj` and `X.experts.down_proj` are made of the tensors of single experts.

    Only missing tensors among `needed` are made: of `X.experts.0.gate_proj.weight` and so on, each (outputs, inputs).
    """

    source: TensorSource
    needed: Collection[str]

    @cached_property
    def _expert_names_by_stacked_name(self) -> dict[str, Sequence[Sequence[str]]]:
        """
        Names in files by stacked tensor name: one list with all experts' projections, or two lists for gate and up.
        """
        specs = self.source.specs()
        counts: dict[str, int] = {}
        for name in specs:
            if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.down_proj\.weight", name):
                counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
        singles: dict[str, Sequence[Sequence[str]]] = {}
        for name in self.needed:
            layer, _, projection = name.rpartition(".")
            if name not in specs and projection in PARTS and layer in counts:
                experts = [f"{layer}.{expert}" for expert in range(counts[layer])]
                parts = [[f"{expert}.{part}.weight" for expert in experts] for part in PARTS[projection]]
                if all(single in specs for part in parts for single in part):
                    singles[name] = parts
        return singles

    def specs(self) -> Mapping[str, TensorSpec]:
        specs = self.source.specs()
        hidden = {single for parts in self._expert_names_by_stacked_name.values() for part in parts for single in part}
        stacked = {}
        for name, parts in self._expert_names_by_stacked_name.items():
            (outputs, inputs), dtype = specs[parts[0][0]].shape, specs[parts[0][0]].dtype
            stacked[name] = TensorSpec((len(parts[0]), len(parts) * outputs, inputs), dtype)
        return {name: spec for name, spec in specs.items() if name not in hidden} | stacked

    def tensor(self, name: str) -> Tensor:
        if name not in self._expert_names_by_stacked_name:
            return self.source.tensor(name)
        return torch.cat(
            [torch.stack([*map(self.source.tensor, part)]) for part in self._expert_names_by_stacked_name[name]], 1
        )
