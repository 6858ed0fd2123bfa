"""A PEFT folder, of a run or of PEFT itself, as the initial values of a run's adapters."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from drawloom import UserError
from drawloom.components.storage.durable_files import read_file
from drawloom.components.storage.safetensors.reader import SafetensorsFolder, read_safetensors_header
from drawloom.components.storage.safetensors.writer import format_names
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.components.weights.adapted import build_meta_model_with_adapters
from drawloom.components.weights.load import fill_module, find_wrong_shapes, folder_fingerprint, persistent_tensors
from drawloom.components.weights.peft import BASE_KEY, PREFIX, WEIGHTS, PeftFormat
from drawloom.graph.toml.emit import dump_toml
from drawloom.ports import ADAPTER_CONFIG, STATE, Adapter, LanguageModel, LowRank, Model, Settings, TensorSlice

MAX_CONFIG_SIZE = 2**24  # bytes

FACTOR = re.compile(r"(\.base_layer)*\.(lora_(embedding_)?[AB](\.weight)?|lora_magnitude_vector)$")
"""Ending of PEFT's names for an adapter's tensors."""

BASE_COPIES = (".embed_tokens.base_layer.weight", "lm_head.base_layer.weight")
"""Endings of frozen tensors of the base, which PEFT saves beside adapters of the embedding or the head."""

CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of PEFT's `init_lora_weights` that change base weights, too."""


@attrs.frozen
class AdapterFolder:
    """A PEFT folder with LoRA, with its settings in `adapter_config.json`."""

    folder: Path
    config: Settings

    @classmethod
    def read(cls, folder: Path) -> "AdapterFolder":
        """Read the settings. Raises UserError if the folder has no adapter, or one of another kind than LoRA."""
        if missing := [name for name in (ADAPTER_CONFIG, WEIGHTS) if not (folder / name).is_file()]:
            has_model = "; a folder of a whole model is a base" if (folder / "config.json").is_file() else ""
            raise UserError(
                f"{folder} has no {' and no '.join(missing)}; write the path of an adapter's folder{has_model}"
            )
        config = _read_object(folder / ADAPTER_CONFIG)
        if config.get("peft_type") != "LORA":
            raise UserError(
                f"{folder / ADAPTER_CONFIG} has peft_type = {config.get('peft_type')!r:.99}, and only LORA is supported"
            )
        if not all(isinstance(config.get(key), int | float) and config[key] > 0 for key in ("r", "lora_alpha")):
            raise UserError(
                f"{folder / ADAPTER_CONFIG} has no numbers above 0 as r and lora_alpha; copy the folder again"
            )
        if str(way := config.get("init_lora_weights")).startswith(CHANGED_BASES):
            text = (
                f"{folder / ADAPTER_CONFIG} has init_lora_weights = {way!r:.99}, which changes the base's weights, too"
            )
            raise UserError(f"{text}; convert the adapter (PEFT's path_initial_model_for_weight_conversion)")
        return cls(folder, config)

    def check(self, model: Model, adapters: Sequence[Adapter], base: Path | None) -> None:
        """
        Raise UserError with all differences between the folder and a run's adapters on a base model.
        """
        peft_format = _create_format(model, adapters, base)
        reasons = [*self._find_differences(peft_format), *self._find_other_base(base)]
        if reasons:
            raise UserError(f"{self.folder} does not fit the run: {'; '.join(reasons)}. {self._describe_settings()}", 2)

    def fill(
        self,
        modules: Iterable[nn.Module],
        model: Model,
        adapters: Sequence[Adapter],
        base: Path | None,
        device: torch.device,
        slices: Mapping[str, TensorSlice],
    ) -> None:
        """Fill the adapters' parameters and fully tuned parameters in modules, if `check` accepts the folder."""
        source, mapper = self._open_tensors(), _create_format(model, adapters, base).mapper.inverse()
        filled = {*mapper.outputs}
        for module in modules:
            fill_module(source, module, mapper, device, persistent_tensors(module).keys() - filled, slices)

    def _open_tensors(self) -> SafetensorsFolder:
        file = read_safetensors_header(self.folder / WEIGHTS)
        return SafetensorsFolder(dict.fromkeys(file.specs, file))

    def _find_differences(self, peft_format: PeftFormat) -> Iterator[str]:
        """Yield in which targets, ranks, scales and shapes differ."""
        mapper, specs = peft_format.mapper.inverse(), self._open_tensors().specs()
        expected = {*mapper.inputs}
        if missing := _list_modules(name for name in expected if name not in specs):
            yield f"the recipe adapts {format_names(missing)}, and the folder does not"
        if extra := _list_modules(name for name in specs if name not in expected and not name.endswith(BASE_COPIES)):
            yield f"the folder adapts {format_names(extra)}, and the recipe does not"
        shapes = {name: tuple(tensor.shape) for name, tensor in persistent_tensors(peft_format.whole).items()}
        yield from find_wrong_shapes(mapper, specs, shapes)
        for pair in peft_format.pairs:
            if not math.isclose(pair.scale, scale := self._compute_scale(pair), rel_tol=1e-6):
                yield f"{pair.target} has factors of scale {pair.scale:.6g}, and of {scale:.6g} in the folder"
                break

    def _compute_scale(self, pair: LowRank) -> float:
        """Return the scale of a pair's factors in PEFT."""
        name = pair.target.removesuffix(".weight")
        rank = self._get_pattern_value("rank_pattern", name, self.config["r"])
        alpha = self._get_pattern_value("alpha_pattern", name, self.config["lora_alpha"])
        return float(alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank))

    def _get_pattern_value(self, key: str, name: str, default: float) -> float:
        """Return a module's value in `rank_pattern` or `alpha_pattern`; keys are regular expressions for ends."""
        patterns = self.config.get(key) or {}
        return next((value for end, value in patterns.items() if re.match(rf"(.*\.)?({end})$", name)), default)

    def _find_other_base(self, base: Path | None) -> Iterator[str]:
        """Yield a reason if the folder or its base has other weights."""
        recorded = self.config.get("base_model_name_or_path")
        state = _read_object(self.folder / STATE) if (self.folder / STATE).is_file() else {}
        fingerprint = state.get(BASE_KEY)
        if fingerprint is None and isinstance(recorded, str) and any(Path(recorded).glob("*.safetensors")):
            fingerprint = folder_fingerprint(Path(recorded))
        if base is not None and fingerprint is not None and fingerprint != folder_fingerprint(base):
            yield f"its base{f' {recorded:.200}' if recorded else ''} has other weights than {base}"

    def _describe_settings(self) -> str:
        """Return the folder's settings, as a recipe's adapter has them."""
        config, targets = self.config, self.config.get("target_modules")
        words = {"rank": config["r"], "alpha": config["lora_alpha"], "targets": targets}
        words |= {name: True for name, key in (("rslora", "use_rslora"), ("dora", "use_dora")) if config.get(key)}
        shown = ", ".join(f"{name} = {dump_toml(value)[:300]}" for name, value in words.items() if value is not None)
        patterns = [
            key for key in ("rank_pattern", "alpha_pattern", "target_parameters", "modules_to_save") if config.get(key)
        ]
        return f"The folder has {shown}" + "".join(f", and a {key}" for key in patterns)


def _create_format(model: Model, adapters: Sequence[Adapter], base: Path | None) -> PeftFormat:
    """Return PEFT's format of a model with adapters. Raises UserError for a model without Hugging Face's names."""
    if not isinstance(model, LanguageModel):
        raise UserError(f"{type(model).__name__} has no names of Hugging Face's, so it can't have adapters of PEFT", 2)
    return PeftFormat.create(model, build_meta_model_with_adapters(model, adapters), base)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UserError if it can't be read."""
    try:
        content = parse_strict_json(read_file(path, MAX_CONFIG_SIZE), max_values=MAX_CONFIG_SIZE)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {error}; copy the folder again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} has no JSON object; copy the folder again")
    return content


def _list_modules(names: Iterable[str]) -> list[str]:
    """Return the sorted modules behind PEFT's tensors; the tensor itself for a fully tuned one."""
    return sorted({FACTOR.sub("", name.removeprefix(PREFIX)) for name in names})
