"""Names and forms of a transformers model's tensors on disk, as a mapper."""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drawloom.components.model.fallback.parts import SelfCheckError
from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.weights.mapper import parallel
from drawloom.components.weights.mapper_ops import rename


def create_conversion_mapper(whole: Any, names: Collection[str]) -> Mapper:
    """
    Return the mapper from parameters of these names to transformers' tensors on disk.

    Raises SelfCheckError for a conversion that does not make one parameter of one or more tensors.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping  # takes seconds
    from transformers.core_model_loading import PrefixChange

    conversions = get_model_conversion_mapping(whole, add_legacy=False)
    conversions = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
    if not conversions:
        return rename({name: name for name in names})
    layout = _Layout(whole, conversions)
    state = whole.state_dict()
    by_parameter = layout.list_names_on_disk({name: state[name].to("meta") for name in names})
    if wrong := sorted(by_parameter.keys() ^ set(names)):
        raise SelfCheckError(
            "weights", f"transformers' conversion of {wrong[0]} to files can't be inverted parameter by parameter"
        )
    return parallel(*(layout.mapper(name, by_parameter[name]) for name in names))


class _Layout:
    """Converter between a model's parameters and its tensors on disk, by transformers' own rules."""

    def __init__(self, whole: Any, conversions: Sequence[Any]) -> None:
        from transformers.core_model_loading import WeightConverter

        self.whole = whole
        self.conversions = conversions
        self.converters = [part for part in conversions if isinstance(part, WeightConverter)]
        self.renamings = [part for part in conversions if not isinstance(part, WeightConverter)]

    def list_names_on_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
        """Return every parameter's names on disk, in conversion order, for meta tensors of any shape."""
        from transformers.core_model_loading import dot_natural_key

        by_parameter: dict[str, list[str]] = {}
        for name in sorted(self.convert_to_disk(tensors), key=dot_natural_key):
            by_parameter.setdefault(self._find_parameter_and_pattern(name)[0], []).append(name)
        return by_parameter

    def mapper(self, parameter: str, names: Sequence[str]) -> Mapper:
        """Return the mapper from a parameter to its tensors on disk."""
        _, pattern = self._find_parameter_and_pattern(names[0])
        if pattern is None:
            return rename({parameter: names[0]})

        def convert(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            converted = self.convert_to_disk({parameter: tensors[0]})
            return [converted[name] for name in names]

        def revert(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [self.convert_to_parameter(parameter, dict(zip(names, tensors, strict=True)))]

        return Mapper((TensorGroup((parameter,), tuple(names), convert, revert),))

    def convert_to_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert parameters of any shape to tensors on disk."""
        from transformers.core_model_loading import revert_weight_conversion

        self.whole._weight_conversions = [*self.conversions]
        try:
            with torch.no_grad():
                converted: dict[str, Tensor] = revert_weight_conversion(self.whole, dict(tensors))
        except Exception as error:  # any conversion of transformers
            reason = str(error).strip().partition("\n")[0]
            raise SelfCheckError("weights", f"transformers can't convert the parameters for disk: {reason}") from error
        return converted

    def convert_to_parameter(self, parameter: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """Convert a parameter's tensors on disk, of any shape, to the parameter."""
        converter: Any = None
        for name, tensor in tensors.items():
            _, pattern = self._find_parameter_and_pattern(name)
            if converter is None:
                converter = copy.deepcopy(next(part for part in self.converters if pattern in part.source_patterns))
            converter.add_tensor(parameter, name, pattern, tensor)
        with torch.no_grad():
            converted = converter.convert(parameter, model=self.whole, config=self.whole.config)
        value = converted[parameter]
        return value[0] if isinstance(value, list) else value  # type: ignore[no-any-return]

    def _find_parameter_and_pattern(self, name: str) -> tuple[str, str | None]:
        """Map a tensor's name on disk to its parameter, and its WeightConverter's pattern; None if only renamed."""
        from transformers.core_model_loading import rename_source_key

        parameter, pattern = rename_source_key(name, self.renamings, self.converters)
        return parameter, pattern
