"""PEFT's format for adapters: its tensors, by a mapper with an inverse, and its `adapter_config.json`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from drawloom import UserError
from drawloom.components.weights.adapted import EMBEDDING, HEAD
from drawloom.components.weights.load import persistent_tensors
from drawloom.components.weights.mapper import parallel, rename, sequential, transpose
from drawloom.ports import (
    AdaptedLayer,
    HasTransformersModules,
    LanguageModel,
    LinearLayer,
    LowRank,
    Mapper,
    Settings,
    TensorGroup,
    find_adapted_layers,
)

WEIGHTS = "adapter_model.safetensors"
"""File with an adapter's tensors."""

BASE_KEY = "base_fingerprint"
"""Key with the fingerprint of the base model's weights, in our own file in an adapter's folder."""

PREFIX = "base_model.model."
"""Prefix that PEFT adds to the tensor names of transformers."""


@attrs.frozen(eq=False)
class JoinedLayer:
    """
    Linear layer `name` in transformers; `group` makes its weight from several layers' weights.

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
        joins = (
            (lambda factors: [torch.cat([*factors])], self._split_input_factor),
            (self._join_output_factors, self._split_output_factor),
            (self._join_magnitudes, self._split_magnitude),
        )
        groups, [first, *_] = [], self.parts.values()
        # Without DoRA there are no magnitudes.
        for group, (join, split) in zip(first.make_mapper_to_peft(self.name).groups, joins, strict=False):
            inputs = tuple(group.inputs[0].replace(self.name, part, 1) for part in self.parts)
            groups.append(TensorGroup(inputs, group.outputs, join, split))
        return Mapper(tuple(groups))

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
        """Return the parts' A, (rank, inputs): their rows of a joined factor, or one factor of PEFT for all parts."""
        [factor] = tensors
        return [factor[columns] for columns in self._list_factor_columns(len(factor))]

    def _split_output_factor(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the parts' B. Raises UserError for a change in other outputs, or with another rank."""
        [factor] = tensors
        by_name = dict(zip(self._layer_names, self.group.inverse().convert([factor]), strict=True))
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
        return [part.squeeze(1) for part in self.group.inverse().convert([tensors[0].unsqueeze(1)])]

    def _join_magnitudes(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Join the parts' magnitudes, (outputs,) per part, to (all outputs,)."""
        by_name = dict(zip(self.parts, tensors, strict=True))
        [joined] = self.group.convert([by_name[name].unsqueeze(1) for name in self._layer_names])
        return [joined.squeeze(1)]


MULTIMODAL = "model.language_model."
"""Prefix of the decoder's modules in a multimodal model."""

MAMBA_TYPES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Types of models without LoRA on `out_proj` in PEFT 0.21, because Mamba's kernels read its weight themselves."""


@attrs.frozen(eq=False)
class PeftFormat:
    """
    PEFT's names and forms for a model's adapters and fully tuned modules.

    `whole` is the model on the meta device, `module_mapper` maps it to the base model as transformers builds it, and
    `config` is its `config.json`.
    """

    whole: nn.Module
    module_mapper: Mapper
    config: Settings

    @classmethod
    def create(cls, model: LanguageModel, whole: nn.Module, base: Path | None) -> "PeftFormat":
        """Return the format for a model over the base model in a folder."""
        if isinstance(model, HasTransformersModules):
            mapper = model.transformers_mapper(base)
        else:
            mapper = model.hugging_face_mapper()
        return cls(whole, mapper, model.hugging_face_config())

    @property
    def mapper(self) -> Mapper:
        """The mapper from the parameters in adapters and in fully tuned modules to PEFT's tensors."""
        joined = (layer.peft_mapper_joining_parts for layer in self._joined_layers)
        alone = (self._map_layer(name, module, layer) for name, module, layer in self._other_layers)
        return parallel(*joined, *alone, self._tuned_tensor_mapper)

    @property
    def pairs(self) -> list[LowRank]:
        """PEFT's descriptions of all low-rank pairs; joined layers have one pair."""
        has_experts = any(name.endswith(".experts") for name, _ in self.whole.named_modules())
        joined = (layer.peft_pair for layer in self._joined_layers)
        alone = (layer.list_low_rank_pairs(module) for _, module, layer in self._other_layers)
        return [_name_non_expert_pair_by_weight(has_experts, pair) for pair in (*joined, *chain(*alone))]

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
        if self.config.get("model_type") in MAMBA_TYPES and any(pair.target.endswith(".out_proj") for pair in pairs):
            endings = {pair.target.removesuffix(".weight").rpartition(".")[2] for pair in pairs} - {"out_proj"}
            raise UserError(
                "PEFT has no LoRA for out_proj in models with Mamba, whose kernels read its weight themselves; name "
                f"other layers in the adapters' targets, such as {sorted(endings)}, or write export.hugging_face in "
                "place of export.adapter"
            )
        # PEFT warns of patterns for fused parameters, though it uses them, so fused parameters get the defaults.
        (rank, scale), _ = Counter((pair.rank, pair.scale) for pair in fused or pairs).most_common(1)[0]
        others = [pair for pair in pairs if (pair.rank, pair.scale) != (rank, scale)]
        dropouts = {pair.dropout for pair in pairs}
        tuned = {name.removeprefix(PREFIX).rpartition(".")[0]: None for name in self._tuned_tensor_mapper.outputs}
        # PEFT copies modules with those inside.
        saved = [name for name in tuned if not name.startswith(tuple(f"{outer}." for outer in tuned))]
        modules = [pair.target for pair in pairs if not pair.fused]
        # In a multimodal model ends of names would match modules of other parts, such as a vision tower.
        if not any(name.startswith(MULTIMODAL) for name in modules):
            modules = _shorten_module_names(self.module_mapper.outputs, modules)
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
            "modules_to_save": saved or None,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "inference_mode": True,
        }

    @property
    def _joined_layers(self) -> list[JoinedLayer]:
        """Transformers' linear layers with an adapted part. One may join several of our layers, such as q, k and v."""
        joined, adapted = [], dict(find_adapted_layers(self.whole))
        for group in self.module_mapper.groups:
            names = [name.removesuffix(".weight") for name in group.inputs]
            if parts := {name: adapted[name] for name in names if isinstance(adapted.get(name), LinearLayer)}:
                rows = [len(self.whole.get_parameter(name)) for name in group.inputs]
                joined.append(JoinedLayer(group.outputs[0].removesuffix(".weight"), group, parts, rows))
        return joined

    @property
    def _other_layers(self) -> Iterator[tuple[str, str, AdaptedLayer]]:
        """Our name, transformers' and the layer for all other adapted layers: embeddings, experts and tied heads."""
        names = {
            group.inputs[0].rpartition(".")[0]: group.outputs[0].rpartition(".")[0]
            for group in self.module_mapper.groups
        }
        for name, layer in find_adapted_layers(self.whole):
            if not isinstance(layer, LinearLayer):
                yield name, names.get(name, name), layer

    @property
    def _tuned_tensor_mapper(self) -> Mapper:
        """The mapper from fully tuned modules' tensors to PEFT's. Raises UserError if PEFT would tune more."""
        tuned, groups = _list_tensors_of_tuned_modules(self.whole), self.module_mapper.groups
        tuned_groups = [group for group in groups if not tuned.isdisjoint(group.inputs)]
        modules = tuple(f"{group.outputs[0].rpartition('.')[0]}." for group in tuned_groups)
        for group in groups:
            if group.outputs[0].startswith(modules) and not tuned.issuperset(group.inputs):
                raise UserError(
                    f"PEFT tunes whole modules of transformers, and {group.outputs[0]} is not tuned as a whole; change "
                    "the targets of adapters.full_tuning, or write export.hugging_face in place of export.adapter"
                )
        return Mapper(tuple(map(self._name_tuned_tensor, tuned_groups)))

    def _map_layer(self, name: str, module: str, layer: AdaptedLayer) -> Mapper:
        """Map an adapter's parameters to PEFT's tensors for transformers' module."""
        mapper = layer.make_mapper_to_peft(name)
        names = {output: output.replace(name, module, 1) for output in mapper.outputs}
        reordered = (self._reorder_outputs(factor) for factor in mapper.inputs if factor.endswith("_proj_lora_B"))
        return sequential(parallel(*reordered), mapper, rename(names))

    def _reorder_outputs(self, factor: str) -> Mapper:
        """Return the mapper from experts' factor (experts, outputs, rank) to transformers' order of outputs."""
        name = factor.removesuffix("_lora_B")
        [group] = (group for group in self.module_mapper.groups if name in group.inputs)
        mapper = Mapper((attrs.evolve(group, inputs=(factor,), outputs=(factor,)),))
        weight = self.whole.get_parameter(name)
        experts, outputs, _ = weight.shape
        [probe] = group.convert([weight.new_empty(experts, outputs, outputs + 1)])
        # transformers may have (experts, inputs, outputs).
        return mapper if probe.shape[1] == outputs else sequential(mapper, transpose(factor, 1, 2))

    def _name_tuned_tensor(self, group: TensorGroup) -> TensorGroup:
        """Return a tuned tensor's group with PEFT's name; a tied embedding is also the head, which PEFT unties."""
        name = f"{PREFIX}{group.outputs[0]}"
        if self.config.get("tie_word_embeddings") and group.inputs == (f"{EMBEDDING}.weight",):
            outputs = (name, f"{PREFIX}{HEAD}")
            return TensorGroup(group.inputs, outputs, lambda tensors: [*tensors, *tensors], _take_equal_tables)
        return attrs.evolve(group, outputs=(name,))


def _name_non_expert_pair_by_weight(has_experts: bool, pair: LowRank) -> LowRank:
    """
    Name a pair by its weight parameter instead of its module, in a model with experts.

    PEFT 0.21 treats all modules named like expert projections as experts, even if they are not.
    """
    if not has_experts or pair.target.rpartition(".")[2] not in ("gate_proj", "up_proj", "down_proj") or pair.fused:
        return pair
    return attrs.evolve(pair, target=f"{pair.target}.weight", fused=True)


def _shorten_module_names(tensors: Iterable[str], adapted: Sequence[str]) -> list[str]:
    """Return names for `target_modules`: the last part if all modules with this ending are adapted, else the name."""
    modules = {tensor.rpartition(".")[0] for tensor in tensors}
    others = {name.rpartition(".")[2] for name in modules.difference(adapted)}
    return sorted({name if (ending := name.rpartition(".")[2]) in others else ending for name in adapted})


def _list_tensors_of_tuned_modules(whole: nn.Module) -> set[str]:
    """Return parameters and buffers of fully or partly tuned modules, because PEFT saves whole modules."""
    modules = {name.rpartition(".")[0] for name, parameter in whole.named_parameters() if parameter.requires_grad}
    modules -= {name for name, _ in find_adapted_layers(whole)}
    return {name for name in persistent_tensors(whole) if name.rpartition(".")[0] in modules}


def _take_equal_tables(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the table of an embedding and a tied head, two tensors in PEFT. Raises UserError if they differ."""
    table, head = tensors
    if not table.is_meta and not torch.equal(table, head):
        raise UserError(
            f"{EMBEDDING} and its tied head were trained apart; take a model with tie_word_embeddings = false"
        )
    return [table]
