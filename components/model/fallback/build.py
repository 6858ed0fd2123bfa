"""Models of transformers with parameters on the meta device and real buffers."""

import json
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drawloom.components.model.decoder.hugging_face import locate_config_json, read_config_json
from drawloom.components.model.fallback.attention import NAME, register_attention
from drawloom.components.model.fallback.parts import mask_layer_number
from drawloom.graph import UserError


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
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"transformers can't read the config.json in {path}: {reason}") from error
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

    with torch.device("cpu"), no_init_weights(), _register_parameters_on_meta():
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


@contextmanager
def _register_parameters_on_meta() -> Iterator[None]:
    """Move every parameter to the meta device as soon as a module registers it."""
    register_parameter = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        register_parameter(self, name, param)

    module_class: Any = nn.Module
    module_class.register_parameter = register_on_meta
    try:
        yield
    finally:
        module_class.register_parameter = register_parameter
