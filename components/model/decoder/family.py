"""Model family: a config, and the differences from other families in files."""

from collections.abc import Mapping
from typing import Any

import attrs

from drawloom.components.model.decoder.config import DecoderConfig, config_fields
from drawloom.ports import ConfigJson, Settings

COMMON_FIXED = {"attention_dropout": 0.0, "hidden_act": "silu"}
"""The `fixed` values of all families."""


TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Keys for token ids: null, as transformers' defaults may lie outside the vocabulary."""


@attrs.frozen
class Family:
    """
    Family of models in files: its config class, and its keys in a `config.json`.

    `hf_defaults` are transformers' defaults for a config's keys, where they differ from ours; `fixed` are values that a
    config must have for a model to be built, and gets when it is written. With `derives_head_dim` a config may leave
    out head sizes. Files may have `model_type` or one of `other_types`; multimodal models with `nested_types` have such
    a config as `text_config`, and map to the decoder's prefix in the model that transformers builds for causal language
    modeling. `ignored` are patterns (fnmatch) for tensors that are not loaded. `has_classifier` tells whether
    transformers has a sequence classifier for `model_type`.
    """

    config: type[DecoderConfig]
    model_type: str
    class_name: str
    hf_defaults: Settings = attrs.field(factory=dict)
    fixed: Settings = attrs.field(factory=dict)
    derives_head_dim: bool = True
    other_types: tuple[str, ...] = ()
    nested_types: Mapping[str, str] = attrs.field(factory=dict)
    ignored: tuple[str, ...] = ()
    has_classifier: bool = True
    keys: "dict[str, attrs.Attribute[Any]]" = attrs.field(init=False, repr=False, eq=False)
    """The fields of the config class: the keys of a `config.json`, and the settings with their names."""

    @keys.default
    def _read_keys(self) -> "dict[str, attrs.Attribute[Any]]":
        return config_fields(self.config)

    @property
    def required_keys(self) -> list[str]:
        """The keys without a default."""
        return [key for key, field in self.keys.items() if field.default is attrs.NOTHING]

    @property
    def constants(self) -> ConfigJson:
        """The keys' defaults, except those that depend on other keys or on the tokenizer."""
        return {key: field.default for key, field in self.keys.items() if isinstance(field.default, int | float | None)}

    def build_config(self, architecture: DecoderConfig) -> ConfigJson:
        """Return the `config.json` for a model; an export fills in the token ids."""
        # Rotary scaling has another form in files.
        values = {key: getattr(architecture, key) for key in self.keys if key != "rope_scaling"}
        values |= {key: values[key] or None for key in self.config.zero_is_null}
        numbers = {self.config.renamed.get(key, key): value for key, value in values.items()}
        named = {"architectures": [self.class_name], "model_type": self.model_type}
        rope: ConfigJson = {}
        if architecture.rope_scaling is not None:
            from drawloom.components.model.decoder.rope_scaling import build_rope_parameters

            rope = build_rope_parameters(architecture.rope_scaling, architecture.rope_theta, architecture.rotary_dim)
        no_ids = dict.fromkeys(TOKEN_IDS)
        fixed = {**COMMON_FIXED, **self.fixed}
        return self.config.write_keys({**named, **fixed, **numbers, **rope, **no_ids, "use_cache": True})
