"""Models of transformers with parameters on the meta device and real buffers."""

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from drawloom import UserError
from drawloom.components.model.decoder.hugging_face import locate_config_json, read_config_json
from drawloom.components.model.fallback.module import (
    NAME,
    SelfCheckError,
    get_first_line,
    mask_layer_number,
    register_attention,
)
from drawloom.components.weights.mapper import parallel, rename
from drawloom.ports import Mapper, TensorGroup


def load_transformers_config(path: Path) -> Any:
    """Return transformers' config of a folder. Raises UserError for a type or values that transformers rejects."""
    from transformers import CONFIG_MAPPING  # takes seconds

    values = read_config_json(locate_config_json(path))
    kinds: Any = CONFIG_MAPPING
    if (kind := values.get("model_type")) not in kinds:
        raise UserError(f"{path} says model_type = {json.dumps(kind)}, which the installed transformers does not have")
    try:
        config = kinds[kind].from_dict(values)
    except Exception as error:  # transformers checks values in many ways
        raise UserError(f"transformers can't read the config.json in {path}: {get_first_line(error)}") from error
    for key, value in config.to_dict().items():
        if key.endswith(("dropout", "pdrop")) and isinstance(value, float) and value > 0:
            raise UserError(f"{path} says {key} = {value}, and dropout is not supported; write {key} = 0 there")
    return config


def has_transformers_classifier(path: Path) -> bool:
    """Return whether transformers has a sequence classifier for a folder's model."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING  # takes seconds

    return type(load_transformers_config(path)) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING


def build_transformers_model(config: Any, attention: str = NAME, experts: str | None = None) -> Any:
    """
    Build transformers' causal LM in float32, with initial values of its own.

    `experts` names transformers' implementation of experts; by default the fastest one.
    """
    from transformers import AutoModelForCausalLM  # takes seconds

    register_attention()
    kinds: Any = AutoModelForCausalLM
    config = type(config).from_dict(config.to_dict())  # the model changes its config
    options = {"attn_implementation": attention, "experts_implementation": experts, "dtype": torch.float32}
    return kinds.from_config(config, **{key: value for key, value in options.items() if value is not None})


def build_meta_model(config: Any) -> Any:
    """Build transformers' causal LM with parameters on the meta device, and buffers on the CPU."""
    from transformers.initialization import no_init_weights  # takes seconds

    def move_to_meta(_: nn.Module, __: str, parameter: nn.Parameter) -> nn.Parameter | None:
        # A parameter on the meta device stays the same object, as it may be tied to another.
        return None if parameter.is_meta else nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move_to_meta)  # type: ignore[arg-type]  # torch says None
    with torch.device("cpu"), no_init_weights(), hook:
        return build_transformers_model(config)


def allocate_parameters(module: nn.Module, device: torch.device) -> None:
    """Give a module's parameters memory on a device, without values."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            empty = torch.empty_like(parameter, device=device)
            part.register_parameter(name, nn.Parameter(empty, parameter.requires_grad))


def find_float32_patterns(whole: Any) -> list[str]:
    """Return patterns of the parameters that transformers keeps in float32 when a model is loaded in bfloat16."""
    kept: Collection[str] = whole._keep_in_fp32_modules_strict
    # A pattern is one or more whole parts of a name.
    names = [name for name, _ in whole.named_parameters() if any(f".{part}." in f".{name}." for part in kept)]
    return sorted({mask_layer_number(name) for name in names})


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
    patterns = layout.list_patterns({name: state[name].to("meta") for name in names})
    if wrong := sorted(patterns.keys() ^ set(names)):
        raise SelfCheckError(
            "weights", f"transformers' conversion of {wrong[0]} to files can't be inverted parameter by parameter"
        )
    return parallel(*(layout.mapper(name, patterns[name]) for name in names))


class _Layout:
    """Converter between a model's parameters and its tensors on disk, by transformers' own rules."""

    def __init__(self, whole: Any, conversions: Sequence[Any]) -> None:
        from transformers.core_model_loading import WeightConverter

        self.whole = whole
        self.conversions = conversions
        self.converters = [part for part in conversions if isinstance(part, WeightConverter)]
        self.renamings = [part for part in conversions if not isinstance(part, WeightConverter)]

    def list_patterns(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, str | None]]:
        """
        Return every parameter's names on disk with their WeightConverter's patterns; None if only renamed.

        Names are in conversion order; `tensors` are meta tensors of any shape.
        """
        from transformers.core_model_loading import dot_natural_key, rename_source_key

        by_parameter: dict[str, dict[str, str | None]] = {}
        for name in sorted(self.convert_to_disk(tensors), key=dot_natural_key):
            parameter, pattern = rename_source_key(name, self.renamings, self.converters)
            by_parameter.setdefault(parameter, {})[name] = pattern
        return by_parameter

    def mapper(self, parameter: str, patterns: Mapping[str, str | None]) -> Mapper:
        """Return the mapper from a parameter to its tensors on disk; see `list_patterns`."""
        names = [*patterns]
        if patterns[names[0]] is None:
            return rename({parameter: names[0]})

        def convert(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            converted = self.convert_to_disk({parameter: tensors[0]})
            return [converted[name] for name in names]

        def revert(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return [self.convert_to_parameter(parameter, patterns, tensors)]

        return Mapper((TensorGroup((parameter,), tuple(names), convert, revert),))

    def convert_to_disk(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert parameters of any shape to tensors on disk."""
        from transformers.core_model_loading import revert_weight_conversion

        self.whole._weight_conversions = [*self.conversions]
        try:
            with torch.no_grad():
                converted: dict[str, Tensor] = revert_weight_conversion(self.whole, dict(tensors))
        except Exception as error:  # any conversion of transformers
            why = f"transformers can't convert the parameters for disk: {get_first_line(error)}"
            raise SelfCheckError("weights", why) from error
        return converted

    def convert_to_parameter(
        self, parameter: str, patterns: Mapping[str, str | None], tensors: Sequence[Tensor]
    ) -> Tensor:
        """Convert a parameter's tensors on disk, of any shape and in the order of `patterns`, to the parameter."""
        first = next(iter(patterns.values()))
        converter: Any = copy.deepcopy(next(part for part in self.converters if first in part.source_patterns))
        for (name, pattern), tensor in zip(patterns.items(), tensors, strict=True):
            converter.add_tensor(parameter, name, pattern, tensor)
        with torch.no_grad():
            converted = converter.convert(parameter, model=self.whole, config=self.whole.config)
        value = converted[parameter]
        return value[0] if isinstance(value, list) else value  # type: ignore[no-any-return]
