"""Names of a text model's tensors in the files of a multimodal model that contains it."""

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

import attrs
from torch import Tensor

from drawloom.components.storage.tensor_source import TensorSource, TensorSpec

STYLES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("model.", "model.language_model."),),
)
"""Prefixes in a text model, and those in files of a multimodal model: the forms of transformers 4 and 5."""

NameNesting = Iterable[tuple[str, str]]


def find_multimodal_prefixes(names: Iterable[str], needed: Collection[str] = ()) -> NameNesting:
    """Return (text prefix, prefix in files) pairs for these names; () if none is nested or a model needs such names."""
    names = list(names)
    for style in STYLES:
        marker = style[0][1]
        if any(name.startswith(marker) for name in names) and not any(name.startswith(marker) for name in needed):
            return style
    return ()


def to_multimodal_name(name: str, style: NameNesting) -> str:
    """Return the name in files of the multimodal model for a tensor of the text model."""
    for inner, outer in style:
        if name.startswith(inner):
            return outer + name.removeprefix(inner)
    return name


def to_text_name(name: str, style: NameNesting) -> str:
    """Return the name in the text model for a tensor in files of the multimodal model; other parts keep theirs."""
    for inner, outer in style:
        if name.startswith(outer):
            return inner + name.removeprefix(outer)
    return name


@attrs.frozen(slots=False)
class TextTensors:
    """Source with a multimodal model's text tensors under a text model's names, unless `needed` has nested names."""

    source: TensorSource
    needed: Collection[str]

    @cached_property
    def _file_names_by_text_name(self) -> dict[str, str]:
        """Names in files by names in the text model."""
        names = list(self.source.specs())
        style = find_multimodal_prefixes(names, self.needed)
        return {to_text_name(name, style): name for name in names}

    def specs(self) -> Mapping[str, TensorSpec]:
        specs = self.source.specs()
        return {name: specs[original] for name, original in self._file_names_by_text_name.items()}

    def tensor(self, name: str) -> Tensor:
        return self.source.tensor(self._file_names_by_text_name[name])
