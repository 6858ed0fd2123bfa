"""PEFT's format for adapters: its tensors, by a mapper with an inverse, and its `adapter_config.json`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom import UserError
from drawloom.components.weights.adapted import EMBEDDING, HEAD
from drawloom.components.weights.load import persistent_tensors
from drawloom.components.weights.mapper import parallel, rename, return_unchanged, sequential
from drawloom.ports import (
    AdaptedLayer,
    Convert,
    KeepsConfig,
    LanguageModel,
    LowRank,
    Mapper,
    TensorGroup,
    find_adapted_layers,
)

WEIGHTS = "adapter_model.safetensors"
"""File with an adapter's tensors."""

BASE_KEY = "base_fingerprint"
"""Key with the fingerprint of the base model's weights, in our own file in an adapter's folder."""

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
        conversions = {
            A: (_join_input_factors, self._split_input_factor),
            B: (self._join_output_factors, self._split_output_factor),
        } | ({MAGNITUDE: (self._join_magnitudes, self._split_magnitude)} if self.peft_pair.dora else {})
        groups = []
        for leaf, (join, split) in conversions.items():
            inputs = tuple(f"{PREFIX}{part}.{leaf}" for part in self.parts)
            groups.append(TensorGroup(inputs, (f"{PREFIX}{self.name}.{leaf}",), join, split))
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

    def _split_input_factor(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the parts' A: their rows of a joined factor, or one factor of PEFT for all parts."""
        [factor] = tensors
        return [factor[columns] for columns in self._list_factor_columns(len(factor))]

    def _split_output_factor(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the parts' B. Raises UserError for a change in other outputs, or with another rank."""
        [factor] = tensors
        by_name = dict(zip(self._layer_names, self._revert(factor), strict=True))
        columns = dict(zip(self.parts, self._list_factor_columns(factor.shape[1]), strict=True))
        pairs, parts, rests = self._pairs_by_layer_name, [], []
        for name, block in by_name.items():
            rest = block.clone()
            if name in columns:
                rest[:, columns[name]] = 0
                parts.append(block[:, columns[name]] * (self.peft_pair.scale / pairs[name].scale))
            rests.append(rest)
        if not factor.is_meta and any(bool(rest.any()) for rest in rests):
            raise UserError(
                f"the factors of {self.name} change more than {', '.join(self.parts)}, or with another rank; adapt all "
                f"of {', '.join(by_name)} with the rank of the folder"
            )
        return parts

    def _list_factor_columns(self, rank: int) -> list[slice]:
        """Return the parts' columns of a pair with this rank: a part's own ones, or all. Raises ValueError."""
        ranks = [pair.rank for pair in self._pairs_by_layer_name.values()]
        ends = [*accumulate(ranks)]
        if rank == ends[-1]:
            return [slice(end - own, end) for own, end in zip(ranks, ends, strict=True)]
        if {*ranks} != {rank}:
            raise ValueError(f"the rank is {rank}, and {' + '.join(map(str, ranks))} in the recipe")
        return [slice(None)] * len(ranks)

    def _split_magnitude(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the parts' magnitudes; with DoRA all layers are parts."""
        return [part.squeeze(1) for part in self._revert(tensors[0].unsqueeze(1))]

    def _revert(self, joined: Tensor) -> Sequence[Tensor]:
        """Split a joined tensor (all outputs, width) by layer, (outputs, width) each."""
        if self.group.revert is None:
            raise UserError(f"factors of {self.name} can't be split; the family's mapping has no inverse")
        return self.group.revert([joined])

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


DECODER = "model."
"""Prefix of the decoder's modules in a text model."""

FILE_PREFIXES = (DECODER, "backbone.")
"""Prefixes of the decoder's tensors in files of text models."""


@attrs.frozen(eq=False)
class PeftFormat:
    """
    PEFT's names and forms for a model's adapters and fully tuned modules.

    `whole` is the model on the meta device, `file_mapper` maps it to files, and `prefix` is the prefix of the decoder's
    modules in the base model as transformers builds it.
    """

    whole: nn.Module
    file_mapper: Mapper
    is_tied: bool
    prefix: str

    @classmethod
    def create(cls, model: LanguageModel, whole: nn.Module, base: Path | None) -> "PeftFormat":
        """Return the format for a model over the base model in a folder."""
        is_tied, prefix = bool(model.hugging_face_config().get("tie_word_embeddings")), DECODER
        if base is not None and isinstance(model, KeepsConfig) and (base / "config.json").is_file():
            prefix = model.find_decoder_prefix(base / "config.json")
        return cls(whole, model.hugging_face_mapper(), is_tied, prefix)

    @property
    def mapper(self) -> Mapper:
        """The mapper from the parameters to PEFT's tensors."""
        mapper = make_mapper_to_peft(self.whole, self.file_mapper, self.is_tied)
        names = {name: PREFIX + self._replace_decoder_prefix(name.removeprefix(PREFIX)) for name in mapper.outputs}
        return mapper if all(name == new for name, new in names.items()) else sequential(mapper, rename(names))

    @property
    def pairs(self) -> list[LowRank]:
        """PEFT's descriptions of all low-rank pairs; joined layers have one pair."""
        pairs = _describe_low_rank_pairs(self.whole, self.file_mapper)
        return [attrs.evolve(pair, target=self._replace_decoder_prefix(pair.target)) for pair in pairs]

    def make_config(self, base_model: str | None) -> dict[str, Any]:
        """Return the `adapter_config.json`. Raises UserError if PEFT does not support the adapters."""
        pairs = self.pairs
        if not pairs:
            raise UserError(
                "an adapter for PEFT needs LoRA, and this run tunes only whole modules; write export.hugging_face in "
                "place of export.adapter"
            )
        if len({pair.dora for pair in pairs}) > 1:
            raise UserError("PEFT has DoRA for all layers or for none; write the same `dora` in all adapters")
        fused = [pair for pair in pairs if pair.fused]
        if fused and pairs[0].dora:
            raise UserError(
                f"PEFT has no DoRA for {fused[0].target} in a model with experts; write export.hugging_face in place "
                "of export.adapter"
            )
        # PEFT warns of patterns for fused parameters, though it uses them, so fused parameters get the defaults.
        (rank, scale), _ = Counter((pair.rank, pair.scale) for pair in fused or pairs).most_common(1)[0]
        others = [pair for pair in pairs if (pair.rank, pair.scale) != (rank, scale)]
        dropouts = {pair.dropout for pair in pairs}
        _check_no_joined_tensors(self.whole, self.file_mapper)
        saved = list(dict.fromkeys(name.rpartition(".")[0] for name in _list_tensors_of_tuned_modules(self.whole)))
        if self.is_tied and EMBEDDING in saved:
            saved.append(HEAD.removesuffix(".weight"))  # PEFT copies modules, which unties them
        modules = [pair.target for pair in pairs if not pair.fused]
        if self.prefix == DECODER:  # otherwise ends of names would match modules of other parts, such as a vision tower
            modules = _shorten_module_names(self.whole, modules)
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
            "target_modules": modules,
            "target_parameters": [pair.target for pair in fused] or None,
            "rank_pattern": {pair.target: pair.rank for pair in others},
            "alpha_pattern": {pair.target: pair.scale * pair.rank for pair in others},
            "modules_to_save": [*map(self._replace_decoder_prefix, saved)] or None,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
        }

    def _replace_decoder_prefix(self, name: str) -> str:
        used = next(filter(name.startswith, FILE_PREFIXES), None)
        return name if used is None else self.prefix + name.removeprefix(used)


def _make_expert_output_reordering_mapper(factors: Sequence[str], own: Mapping[str, TensorGroup]) -> Mapper:
    """Give the experts' second factors, (experts, outputs, rank), the order of the weights' outputs in files."""
    groups = []
    for name in factors:
        weight, _, ending = name.rpartition("_lora_")
        if ending == "B" and weight in own:
            to_file, revert = own[weight].convert, own[weight].revert
            back = None if revert is None else partial(_convert_factor_outputs, to_file, revert)
            groups.append(TensorGroup((name,), (name,), partial(_convert_factor_outputs, to_file, to_file), back))
    return Mapper(tuple(groups))


def _convert_factor_outputs(to_file: Convert, convert: Convert, factors: Sequence[Tensor]) -> Sequence[Tensor]:
    """
    Convert a factor (experts, outputs, rank) like a weight (experts, outputs, inputs), but keep its dimensions.

    `to_file` converts a weight to files, and `convert` is this function or its inverse.
    """
    [factor] = factors
    probe = to_file([torch.empty(len(factor), factor.shape[1], factor.shape[1] + 1, device="meta")])[0]
    if probe.shape[1] == factor.shape[1]:
        return convert([factor])
    # Files have (experts, inputs, outputs).
    if convert is to_file:
        return [convert([factor])[0].transpose(1, 2)]
    return convert([factor.transpose(1, 2)])


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


def _shorten_module_names(whole: nn.Module, adapted: Sequence[str]) -> list[str]:
    """Return names for `target_modules`: the last part if all modules with this ending are adapted, else the name."""
    by_ending: dict[str, set[str]] = {}
    for name, _ in whole.named_modules():
        by_ending.setdefault(name.rpartition(".")[2], set()).add(name)
    adapted_endings = {ending for ending, names in by_ending.items() if names <= {*adapted}}
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


def _check_no_joined_tensors(whole: nn.Module, file_mapper: Mapper) -> None:
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
    if tied and name == f"{EMBEDDING}.weight":
        outputs = (f"{PREFIX}{name}", f"{PREFIX}{HEAD}")
        return Mapper((TensorGroup((name,), outputs, lambda tensors: [*tensors, *tensors], _take_equal_tables),))
    group = own.get(name) or TensorGroup((name,), (name,), return_unchanged, return_unchanged)
    return Mapper((attrs.evolve(group, outputs=(f"{PREFIX}{name}",)),))


def _take_equal_tables(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the table of an embedding and a tied head, two tensors in PEFT. Raises UserError if they differ."""
    table, head = tensors
    if not table.is_meta and not torch.equal(table, head):
        raise UserError(
            f"{EMBEDDING} and its tied head were trained apart; take a model with tie_word_embeddings = false"
        )
    return [table]
