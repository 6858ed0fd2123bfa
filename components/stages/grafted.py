"""Initial values for a model with new parts in a folder's model (surgery)."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import attrs
import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, UserError, component, setting
from drawloom.components.stages.initial_values import InitialValues
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.components.storage.tensor_source import TensorSource
from drawloom.components.weights.dequantized import TextTensors
from drawloom.components.weights.load import fill_module, open_and_check_folder, persistent_tensors
from drawloom.components.weights.mapper import select_outputs
from drawloom.ports import (
    LanguageModel,
    LayerRange,
    Mapper,
    NamePatterns,
    Precision,
    StageFeature,
    StageNodes,
    TensorSlice,
    adapter_parameter_names,
)


@component
class GraftedParts(StageFeature):
    """
    A folder's weights for a model with new parts, such as delta nets in place of attention.

    The parameters in `new` are drawn; the folder must have all others, with their shapes. It may have tensors without a
    parameter only in layers with new ones: they belong to replaced parts. Such a model learns from the folder's again
    by distillation, as in the recipe `heal`.
    """

    keeps_layer_shapes: ClassVar[bool] = True

    model: LanguageModel
    folder: Path | None = setting("Hugging Face folder with the weights of all other parts", default=None)
    new: list[str] = setting(
        "patterns (fnmatch) of new parameters to draw, such as '*.linear_attn.*'",
        check=lambda patterns: None if patterns else "write a pattern, or remove the node",
    )

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems with a missing folder, other initial weights, and patterns that match no parameter."""
        if feature.settings["folder"] is None:
            yield feature.warning("folder", "all parameters are drawn", "write the folder with the other parts")
        if nodes.stages.settings.get("weights") is not None:
            text = f"[{feature.name}] reads the initial weights, and [{nodes.stages.name}] names others"
            yield nodes.stages.problem("weights", text, f"leave it out; [{feature.name}] has the folder")
        if nodes.model is not None and nodes.model.settings.get("weights"):
            text = f"[{feature.name}] reads the initial weights, and [{nodes.model.name}] does so, too"
            yield nodes.model.problem("weights", text, f"write false; [{feature.name}] has the folder")
        if (whole := nodes.build_whole_model_on_meta()) is not None:
            names = [*dict(whole.named_parameters())]
            yield from NamePatterns("stages.grafted", "new", "parameter", feature.settings["new"], names).check(feature)

    def check_before_open(self) -> None:
        """Raise UserError if the folder does not have all other parts."""
        if self.folder is not None:
            with torch.device("meta"):
                whole = self.model.build(LayerRange.of_whole_model(self.model.num_hidden_layers))
            self.open_source(whole, self.find_new(whole))

    def change_initial_values(self, values: InitialValues) -> InitialValues:
        if self.folder is None:
            return values
        return GraftedValues(values.model, values.seed, values.device, self.folder, values.splits, self)

    def describe_model(self, whole: nn.Module, precision: Precision) -> Iterator[str]:
        if self.folder is not None:
            new = self.find_new(whole)
            # A file may join a new parameter with others.
            kept = {name for group in self._mapper.groups if new.isdisjoint(group.outputs) for name in group.inputs}
            named = {*self._mapper.inputs, *self._mapper.ignored}
            replaced = [name for name in self._text_names if name in named and name not in kept]
            yield f"{len(persistent_tensors(whole)) - len(new)} tensors of {self.folder}"
            yield f"new: {_count_by_part(new)}"
            yield f"replaced: {_count_by_part(replaced)}"

    def find_new(self, module: nn.Module) -> set[str]:
        """Return new parameters and persistent buffers by name."""
        return {name for name in persistent_tensors(module) if self.is_new(name)}

    def open_source(
        self, module: nn.Module, excluded: Collection[str], splits: Mapping[str, TensorSlice] = {}
    ) -> TensorSource:
        """Open the folder for a module, without excluded parameters. Raises UserError if it lacks others."""
        assert self.folder is not None
        try:
            return open_and_check_folder(self.folder, module, self._mapper, excluded, splits)
        except UserError as error:
            raise UserError(f"folder: {error}; new parameters are those in `new`", error.exit_code) from error

    def fill(self, module: nn.Module, values: InitialValues) -> None:
        """Replace drawn values in a module by the folder's."""
        excluded = self.find_new(module) | adapter_parameter_names(module)
        source = self.open_source(module, excluded, values.splits)
        fill_module(source, module, self._mapper, values.device, excluded, values.splits)

    def is_new(self, name: str) -> bool:
        """Return whether a parameter is new."""
        return any(fnmatchcase(name, pattern) for pattern in self.new)

    @cached_property
    def _text_names(self) -> Collection[str]:
        """Names of the folder's tensors; a multimodal model's text tensors have the names of a text model."""
        assert self.folder is not None
        return TextTensors(open_safetensors_folder(self.folder), self.model.hugging_face_mapper().outputs).specs()

    @cached_property
    def _mapper(self) -> Mapper:
        """The mapper from the folder to the parameters that are not new; it ignores the tensors of replaced parts."""
        whole = self.model.hugging_face_mapper().inverse()
        mapper = select_outputs(whole, [name for name in whole.outputs if not self.is_new(name)])
        changed_layers = {_find_prefix(name, parts=0) for name in filter(self.is_new, whole.outputs)} - {""}
        kept_parts = {_find_prefix(name, parts=1) for name in mapper.inputs}
        drawn = {*whole.inputs} - {*mapper.inputs}
        # A part has another name in the folder if, for example, a delta net is new in place of attention.
        replaced = [
            name
            for name in self._text_names
            if name in drawn
            or (_find_prefix(name, parts=0) in changed_layers and _find_prefix(name, parts=1) not in kept_parts)
        ]
        return attrs.evolve(mapper, ignored=(*whole.ignored, *replaced))


def _find_prefix(name: str, parts: int) -> str:
    """Return a tensor's layer, such as `model.layers.0.`, followed by this number of its parts; "" outside layers."""
    match = re.match(r".*?\.\d+\." + r"[^.]+\." * parts, name)
    return match[0] if match else ""


def _count_by_part(names: Iterable[str]) -> str:
    """Return counts by a layer's part, for the run's summary."""
    parts = Counter(re.sub(r"(.*?\.)\d+(\.[^.]+).*", r"\1*\2", name) for name in sorted(names))
    return " and ".join(f"{count} in {part}" for part, count in parts.items()) or "nothing"


@attrs.frozen(slots=False)
class GraftedValues(InitialValues):
    """Initializer that draws all parameters, and then reads the others."""

    graft: GraftedParts

    def allocate_and_fill_modules(self, modules: Iterable[nn.Module]) -> None:
        modules = [*modules]
        InitialValues(self.model, self.seed, self.device, None, self.splits).allocate_and_fill_modules(modules)
        for module in modules:
            self.graft.fill(module, self)

    def read_or_draw_frozen_values(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.graft.is_new(name):
            return self._draw_whole_parameter(name, shape, dtype)
        return super().read_or_draw_frozen_values(name, shape, dtype)
