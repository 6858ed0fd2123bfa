"""Exports a run's adapters in PEFT's format."""

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs
import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, UserError, component, setting
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks, run_on_rank0
from drawloom.components.export.hf_writer import STATE, read_exported_step
from drawloom.components.export.shard_writer import gather_states_on_first_rank, make_share_on_all_ranks
from drawloom.components.storage.durable_files import create_temp_folder, remove_folder_atomically
from drawloom.components.storage.safetensors.writer import write_safetensors_file
from drawloom.components.weights.adapted import EMBEDDING, HEAD, build_meta_model_with_adapters, find_adapted_layers
from drawloom.components.weights.convert import persistent_tensors
from drawloom.components.weights.mapper import parallel, return_unchanged, sequential
from drawloom.components.weights.mapper_ops import rename
from drawloom.ports import (
    AdaptedLayer,
    AveragedWeights,
    ConfigJson,
    Convert,
    KeepsConfig,
    LanguageModel,
    LowRank,
    Mapper,
    Mesh,
    RunFolder,
    Settings,
    Stages,
    TensorGroup,
    trains_base_weights,
    use_averages_if_any,
)

PREFIX = "base_model.model."
"""Prefix that PEFT adds to the tensor names of transformers."""

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""PEFT's names of a linear layer's factors, and of DoRA's magnitudes."""


@attrs.frozen(eq=False)
class JoinedLayer:
    """
    Linear layer `name` in a family's files; `group` makes its weight from several layers' weights.

    `parts` are the adapted ones among these layers. Their factors become one pair: in W + scale * B A, A has all parts'
    rows, and B has a part's columns in the part's rows, and zeros elsewhere. `rows` are the row counts of the layers'
    weights.
    """

    name: str
    group: TensorGroup
    parts: Mapping[str, AdaptedLayer]
    rows: Sequence[int]

    @property
    def peft_pair(self) -> LowRank:
        """The factors' description for PEFT. Raises UserError for a part without DoRA beside one with it."""
        pairs = list(self._pairs_by_layer_name.values())
        if any(pair.dora for pair in pairs) and len(pairs) < len(self.rows):
            others = ", ".join(name for name in self._layer_names if name not in self.parts)
            raise UserError(
                f"PEFT has {self.name} as one layer, and DoRA adapts only a part of it; adapt {others}, too"
            )
        return attrs.evolve(pairs[0], target=self.name, rank=sum(pair.rank for pair in pairs))

    @property
    def peft_mapper_joining_parts(self) -> Mapper:
        """Mapper for joining the parts' factors to one pair, with PEFT's tensor names."""
        joins = {A: _join_input_factors, B: self._join_output_factors} | (
            {MAGNITUDE: self._join_magnitudes} if self.peft_pair.dora else {}
        )
        groups = [
            TensorGroup(tuple(f"{PREFIX}{part}.{leaf}" for part in self.parts), (f"{PREFIX}{self.name}.{leaf}",), join)
            for leaf, join in joins.items()
        ]
        return sequential(
            parallel(*(layer.make_mapper_to_peft(name) for name, layer in self.parts.items())), Mapper(tuple(groups))
        )

    @property
    def _layer_names(self) -> list[str]:
        """Names of the layers that make up the joined layer."""
        return [name.removesuffix(".weight") for name in self.group.inputs]

    @property
    def _pairs_by_layer_name(self) -> dict[str, LowRank]:
        """PEFT's factor descriptions for the adapted layers, by layer name."""
        return {name: layer.list_low_rank_pairs(name)[0] for name, layer in self.parts.items()}

    def _join_output_factors(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Join the parts' B, (outputs, rank) per part, to (all outputs, all ranks)."""
        factors, pairs = dict(zip(self.parts, tensors, strict=True)), self._pairs_by_layer_name
        width, scale, start, blocks = self.peft_pair.rank, self.peft_pair.scale, 0, []
        for name, rows in zip(self._layer_names, self.rows, strict=True):
            block = tensors[0].new_zeros(rows, width)
            if name in factors:
                # One scale for all parts: a part with another one has the quotient in its factor.
                block[:, start : start + pairs[name].rank] = factors[name] * (pairs[name].scale / scale)
                start += pairs[name].rank
            blocks.append(block)
        return self.group.convert(blocks)

    def _join_magnitudes(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Join the parts' magnitudes, (outputs,) per part, to (all outputs,)."""
        by_name = dict(zip(self.parts, tensors, strict=True))
        [joined] = self.group.convert([by_name[name].unsqueeze(1) for name in self._layer_names])
        return [joined.squeeze(1)]


def _join_input_factors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Join the parts' A, (rank, inputs) per part, to (all ranks, inputs)."""
    return [torch.cat([*tensors])]


def find_layers_joined_in_files(whole: nn.Module, file_mapper: Mapper) -> Iterator[JoinedLayer]:
    """Yield a whole model's adapted linear layers with another form or name in files; `file_mapper` maps to these."""
    adapted = {
        name: layer
        for name, layer in find_adapted_layers(whole)
        if f"{PREFIX}{name}.{A}" in layer.make_mapper_to_peft(name).outputs
    }
    for group in file_mapper.groups:
        layers = [name.removesuffix(".weight") for name in group.inputs]
        parts = {name: adapted[name] for name in layers if name in adapted}
        if parts and (group.outputs != group.inputs or group.convert is not return_unchanged):
            rows = [len(whole.get_parameter(name)) for name in group.inputs]
            yield JoinedLayer(group.outputs[0].removesuffix(".weight"), group, parts, rows)


WEIGHTS = "adapter_model.safetensors"

log = logging.getLogger("drawloom.run")  # rank 0 prints its messages


@component(impact="safe")
class AdapterExport:
    """
    Writer for `<run folder>/adapter/`, for PEFT to load over the run's base model; without adapters it writes nothing.

    The export is exact, while merging adapters into narrow weights rounds their changes. Fully tuned modules are in
    `modules_to_save`. All experts share one tensor, as in transformers 5. With an `average`, the averaged weights are
    exported.
    """

    model: LanguageModel
    stages: Stages
    folder: RunFolder
    mesh: Mesh
    average: AveragedWeights | None = None
    base_model: str | None = setting("base model's name or path for adapter_config.json", default=None)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield problems for adapters without LoRA, and for new tokens: PEFT would look for them in the base model."""
        stages = node.neighbour("stages")
        adapters = stages.neighbours("adapters") if stages else []
        if stages and adapters and all(trains_base_weights(adapter.component) for adapter in adapters):
            text = f"an adapter for PEFT needs LoRA, and [{stages.name}] tunes only whole modules"
            yield node.problem(
                "use", text, f'write unset = ["{node.name}"], leave it out of on_finish, and take the export'
            )
        if (model := node.neighbour("model")) and model.settings.get("new_tokens"):
            text = f"[{model.name}] has new tokens, which are no part of an adapter for PEFT"
            remedy = f'write unset = ["{node.name}"], leave it out of on_finish, and take the export'
            yield node.problem("use", text, remedy)

    def check_before_open(self) -> None:
        """Raise UserError if PEFT does not support the adapters."""
        if not self.stages.adapters:
            return
        try:
            whole = build_meta_model_with_adapters(self.model, self.stages.adapters)
        except UserError:
            return  # a problem of the stages
        self._make_mapper_and_config(whole)

    def open(self) -> None:
        """Log if there is nothing to export."""
        if not self.stages.adapters:
            log.info("all weights are trained, without adapters, so there is no folder %s", self._adapter_folder)

    def has_result_of_step(self, step: int) -> bool:
        """
        Return whether the folder is from this step, or there are no adapters; it is never incomplete. A collective,
        with equal results.
        """
        return not self.stages.adapters or bool(
            run_on_rank0(self.mesh.world, lambda: read_exported_step(self._adapter_folder) == step)
        )

    def run_after_training(self, step: int) -> None:
        """Write the folder with all ranks' tensors. A collective over all ranks."""
        if self.has_result_of_step(step):
            return
        group = self.mesh.world
        mapper, config = self._make_mapper_and_config(build_meta_model_with_adapters(self.model, self.stages.adapters))
        run_on_rank0(
            group, lambda: remove_folder_atomically(self._adapter_folder)
        )  # it may have the adapter of an earlier step
        with use_averages_if_any(self.average):
            share = make_share_on_all_ranks(self.stages, mapper, group, only_inputs=True)
            tensors, _ = run_and_gather_on_all_ranks(group, share.gather_and_convert_tensors)
            parts = gather_states_on_first_rank(tensors, group)
            merged = {name: tensor for part in parts for name, tensor in part.items()}
            run_on_rank0(group, lambda: _write_adapter_folder(self._adapter_folder, merged, config, step))

    def _make_mapper_and_config(self, whole: nn.Module) -> tuple[Mapper, ConfigJson]:
        """Return the mapper from a model's parameters to PEFT's tensors, and the content for `adapter_config.json`."""
        tied = bool(self.model.hugging_face_config().get("tie_word_embeddings"))
        files = self.model.hugging_face_mapper()
        mapper, config = make_mapper_to_peft(whole, files, tied), make_peft_config(whole, files, tied, self.base_model)
        if (prefix := self._find_decoder_prefix()) != DECODER:
            # Ends of names would match modules of other parts, such as a vision tower.
            names = [pair.target for pair in _describe_low_rank_pairs(whole, files) if not pair.fused]
            mapper = _replace_decoder_prefix_in_mapper(mapper, prefix)
            config = _replace_decoder_prefix_in_config({**config, "target_modules": names}, prefix)
        return mapper, config

    def _find_decoder_prefix(self) -> str:
        """Return the prefix of the decoder's modules in the base model as transformers builds it."""
        folder = self.stages.initial_folder
        if folder is None or not isinstance(self.model, KeepsConfig) or not (folder / "config.json").is_file():
            return DECODER
        return self.model.find_decoder_prefix(folder / "config.json")

    @property
    def _adapter_folder(self) -> Path:
        return self.folder.folder / "adapter"


def _write_adapter_folder(target: Path, tensors: Mapping[str, Tensor], config: Settings, step: int) -> None:
    """Write the folder with one tensor file for PEFT, any shapes; the folder appears complete or not at all."""
    temporary = create_temp_folder(target)
    try:
        write_safetensors_file(temporary.folder / WEIGHTS, tensors)
        (temporary.folder / STATE).write_text(json.dumps({"global_step": step}) + "\n", "utf-8")
        (temporary.folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        temporary.commit()
    finally:
        temporary.discard()


DECODER = "model."
"""Prefix of the decoder's modules in a text model."""


def _replace_decoder_prefix_in_mapper(mapper: Mapper, prefix: str) -> Mapper:
    """Return a mapper to PEFT's tensors for a decoder with another prefix."""
    start = PREFIX + DECODER
    outputs = {name: PREFIX + prefix + name.removeprefix(start) for name in mapper.outputs if name.startswith(start)}
    return sequential(mapper, rename(outputs))


def _make_expert_output_reordering_mapper(factors: Sequence[str], own: Mapping[str, TensorGroup]) -> Mapper:
    """Give the experts' second factors, (experts, outputs, rank), the order of the weights' outputs in files."""
    groups = []
    for name in factors:
        weight, _, ending = name.rpartition("_lora_")
        if ending == "B" and weight in own:
            groups.append(TensorGroup((name,), (name,), partial(_convert_factor_outputs, own[weight].convert)))
    return Mapper(tuple(groups))


def _convert_factor_outputs(convert: Convert, factors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Convert a factor (experts, outputs, rank) like a weight (experts, outputs, inputs), but keep its dimensions."""
    [factor] = factors
    probe = convert([torch.empty(len(factor), factor.shape[1], factor.shape[1] + 1, device="meta")])[0]
    [converted] = convert([factor])
    return [converted if probe.shape[1] == factor.shape[1] else converted.transpose(1, 2)]


def _replace_decoder_prefix_in_config(config: Settings, prefix: str) -> ConfigJson:
    """Return an `adapter_config.json` for a decoder with another prefix."""

    def replace_prefix(name: str) -> str:
        return prefix + name.removeprefix(DECODER) if name.startswith(DECODER) else name

    lists = {key: config[key] and [*map(replace_prefix, config[key])] for key in LISTS}
    tables = {key: {replace_prefix(name): value for name, value in config[key].items()} for key in TABLES}
    return {**config, **lists, **tables}


LISTS = ("target_modules", "target_parameters", "modules_to_save")
TABLES = ("rank_pattern", "alpha_pattern")
"""Keys of `adapter_config.json` with names of modules."""


def make_mapper_to_peft(whole: nn.Module, file_mapper: Mapper, tied: bool) -> Mapper:
    """Map the parameters in adapters and in fully tuned modules to PEFT's tensors; `file_mapper` is the model's."""
    own = {
        group.inputs[0]: group
        for group in file_mapper.groups
        if group.inputs == group.outputs and len(group.inputs) == 1
    }
    joined = list(find_layers_joined_in_files(whole, file_mapper))
    parts = {name for layer in joined for name in layer.parts}
    alone = (layer.make_mapper_to_peft(name) for name, layer in find_adapted_layers(whole) if name not in parts)
    layers = (sequential(_make_expert_output_reordering_mapper(mapper.inputs, own), mapper) for mapper in alone)
    saved = (_make_tuned_tensor_mapper(name, tied, own) for name in _list_tensors_of_tuned_modules(whole))
    return parallel(*(layer.peft_mapper_joining_parts for layer in joined), *layers, *saved)


def make_peft_config(whole: nn.Module, file_mapper: Mapper, tied: bool, base_model: str | None) -> ConfigJson:
    """Return the `adapter_config.json` for a model with adapters. Raises UserError if PEFT does not support them."""
    pairs = _describe_low_rank_pairs(whole, file_mapper)
    if not pairs:
        raise UserError(
            "an adapter for PEFT needs LoRA, and this run tunes only whole modules; write export.hugging_face in place "
            "of export.adapter"
        )
    if len({pair.dora for pair in pairs}) > 1:
        raise UserError("PEFT has DoRA for all layers or for none; write the same `dora` in all adapters")
    fused = [pair for pair in pairs if pair.fused]
    if fused and pairs[0].dora:
        raise UserError(
            f"PEFT has no DoRA for {fused[0].target} in a model with experts; write export.hugging_face in place of "
            "export.adapter"
        )
    # PEFT warns of patterns for fused parameters, though it uses them, so fused parameters get the defaults.
    (rank, scale), _ = Counter((pair.rank, pair.scale) for pair in fused or pairs).most_common(1)[0]
    others = [pair for pair in pairs if (pair.rank, pair.scale) != (rank, scale)]
    dropouts = {pair.dropout for pair in pairs}
    _check_tuned_tensors_are_not_joined_in_files(whole, file_mapper)
    saved = list(dict.fromkeys(name.rpartition(".")[0] for name in _list_tensors_of_tuned_modules(whole)))
    if tied and EMBEDDING in saved:
        saved.append(HEAD.removesuffix(".weight"))  # PEFT copies modules, which unties them
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        # always plain LoRA, because PEFT 0.21 scales fused adapters with rslora by another rank
        "lora_alpha": scale * rank,
        "use_rslora": False,
        "use_dora": pairs[0].dora,
        # only training uses dropout, and PEFT rejects it together with fused experts
        "lora_dropout": dropouts.pop() if len(dropouts) == 1 and not fused else 0.0,
        "target_modules": _list_target_modules(whole, [pair for pair in pairs if not pair.fused]),
        "target_parameters": [pair.target for pair in fused] or None,
        "rank_pattern": {pair.target: pair.rank for pair in others},
        "alpha_pattern": {pair.target: pair.scale * pair.rank for pair in others},
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _describe_low_rank_pairs(whole: nn.Module, file_mapper: Mapper) -> list[LowRank]:
    """Return PEFT's descriptions for all low-rank factor pairs; joined layers have one pair."""
    has_experts = any(name.endswith(".experts") for name, _ in whole.named_modules())
    joined = list(find_layers_joined_in_files(whole, file_mapper))
    parts = {name for layer in joined for name in layer.parts}
    single = [
        pair
        for name, layer in find_adapted_layers(whole)
        if name not in parts
        for pair in layer.list_low_rank_pairs(name)
    ]
    return [
        _name_non_expert_pair_by_weight(has_experts, pair) for pair in (*(layer.peft_pair for layer in joined), *single)
    ]


def _name_non_expert_pair_by_weight(has_experts: bool, pair: LowRank) -> LowRank:
    """
    Name a pair by its weight parameter instead of its module, in a model with experts.

    PEFT 0.21 treats all modules named like expert projections as experts, even if they are not.
    """
    if not has_experts or pair.target.rpartition(".")[2] not in ("gate_proj", "up_proj", "down_proj") or pair.fused:
        return pair
    return attrs.evolve(pair, target=f"{pair.target}.weight", fused=True)


def _list_target_modules(whole: nn.Module, pairs: list[LowRank]) -> list[str]:
    """
    Return names for `target_modules`: the last part if all modules with this ending are adapted, else the whole
    name.
    """
    adapted = {pair.target for pair in pairs}
    by_ending: dict[str, set[str]] = {}
    for name, _ in whole.named_modules():
        by_ending.setdefault(name.rpartition(".")[2], set()).add(name)
    adapted_endings = {ending for ending, names in by_ending.items() if names <= adapted}
    return sorted({ending if (ending := name.rpartition(".")[2]) in adapted_endings else name for name in adapted})


def _list_tensors_of_tuned_modules(whole: nn.Module) -> list[str]:
    """
    Return parameters and buffers of fully or partly tuned modules, because PEFT saves whole
    modules.
    """
    return [
        f"{name}.{leaf}"
        for name, module in whole.named_modules()
        if not isinstance(module, AdaptedLayer)
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        for leaf in persistent_tensors(module)
        if "." not in leaf
    ]


def _check_tuned_tensors_are_not_joined_in_files(whole: nn.Module, file_mapper: Mapper) -> None:
    """Raise UserError for a fully tuned parameter that is a part of another module in files of the family."""
    saved = set(_list_tensors_of_tuned_modules(whole))
    for group in file_mapper.groups:
        modules = {name.rpartition(".")[0] for name in group.outputs}
        for name in saved.intersection(group.inputs):
            owner = name.rpartition(".")[0]
            # Experts, whose tensors in files are of modules inside of theirs, are tuned by the name of their module.
            if any(module != owner and not module.startswith(f"{owner}.") for module in modules):
                raise UserError(
                    f"{name} is a part of {group.outputs[0]} in model files, and PEFT can only tune the whole; write "
                    "export.hugging_face in place of export.adapter"
                )


def _make_tuned_tensor_mapper(name: str, tied: bool, own: Mapping[str, TensorGroup]) -> Mapper:
    """Map a fully tuned module's tensor; a tied embedding is also mapped to the head."""
    outputs = [f"{PREFIX}{name}"]
    if tied and name == f"{EMBEDDING}.weight":
        outputs.append(f"{PREFIX}{HEAD}")
    elif name in own:
        return Mapper((TensorGroup((name,), tuple(outputs), own[name].convert),))
    return Mapper((TensorGroup((name,), tuple(outputs), lambda tensors: [*return_unchanged(tensors)] * len(outputs)),))
