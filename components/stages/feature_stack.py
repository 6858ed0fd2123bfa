"""A rank's features, from the inside to the outside."""

from collections.abc import Iterator, MutableMapping, Sequence

import attrs
from torch import nn

from drawloom.ports import MemoryKind, NamePatterns, Precision, RankSlice, StageFeature


def _sort(features: Sequence[StageFeature]) -> list[StageFeature]:
    return sorted(features, key=lambda feature: feature.order)


@attrs.frozen(eq=False)
class FeatureStack(StageFeature):
    """All features of the stages as one."""

    features: Sequence[StageFeature] = attrs.field(converter=_sort)

    def transform(self, module: nn.Module) -> nn.Module:
        for feature in self.features:
            module = feature.transform(module)
        return module

    def convert(self, module: nn.Module, precision: Precision, splits: MutableMapping[str, RankSlice]) -> None:
        for feature in self.features:
            feature.convert(module, precision, splits)

    def name_patterns(self, modules: Sequence[nn.Module]) -> Iterator[NamePatterns]:
        for feature in self.features:
            yield from feature.name_patterns(modules)

    def place(self, modules: Sequence[nn.Module]) -> None:
        for feature in self.features:
            feature.place(modules)

    def place_on_meta(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        for feature in self.features:
            feature.place_on_meta(modules, blocks)

    def finish(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        for feature in self.features:
            feature.finish(modules, blocks)

    def allocate(self, modules: Sequence[nn.Module]) -> None:
        for feature in self.features:
            feature.allocate(modules)

    def change_device_bytes(self, sizes: MutableMapping[MemoryKind, int]) -> None:
        for feature in self.features:
            feature.change_device_bytes(sizes)

    def count_host_bytes(self) -> int:
        return sum(feature.count_host_bytes() for feature in self.features)

    def describe_model(self, whole: nn.Module, precision: Precision) -> Iterator[str]:
        for feature in self.features:
            yield from feature.describe_model(whole, precision)

    @property
    def do_layers_keep_shapes(self) -> bool:
        """Whether no feature changes the shapes of hidden states between layers."""
        return all(feature.keeps_layer_shapes for feature in self.features)
