"""Exports the adapters of a run in PEFT's format."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor, nn

from drawloom.components.distributed.rank_errors import run_on_all, run_on_rank0
from drawloom.components.export.hf_writer import STATE, exported_step
from drawloom.components.export.shard_writer import own_share
from drawloom.components.ports.adapters import AdaptedLayer, LowRank
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.model import LanguageModel
from drawloom.components.ports.run import RunFolder
from drawloom.components.ports.stages import AveragedWeights, Stages, averaged
from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.storage.durable_files import begin_folder, remove_folder_at_once
from drawloom.components.storage.safetensors.writer import write_tensors
from drawloom.components.weights.adapted import EMBEDDING, HEAD, adapted_layers, adapted_model
from drawloom.components.weights.load import persistent_tensors
from drawloom.components.weights.mapper import parallel, same
from drawloom.components.workspace.workspace import get_configs_parallel
from drawloom.graph import Problem, UserError, component, setting
from drawloom.graph.wiring.node import NodeView

WEIGHTS = "adapter_model.safetensors"


@component(impact="safe")
class AdapterExport:
    """
    Writes `<run folder>/adapter/`, which PEFT loads over the model that the run started from.

    It is exact, where merging adapters into narrow weights rounds their changes. Parts that are tuned in full are in
    it as `modules_to_save`. Experts have one tensor for all, as in transformers 5. With an `average`, what is written
    is averaged.
    """

    model: LanguageModel
    stages: Stages
    folder: RunFolder
    mesh: Mesh
    average: AveragedWeights | None = None
    base_model: str | None = setting(
        default=None, doc="name or path of the model that was adapted, which adapter_config.json records"
    )

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """PEFT would look for new tokens in a table that the model it loads does not have."""
        if (model := node.neighbour("model")) and model.settings.get("new_tokens"):
            text = f"[{model.name}] has new tokens, which are no part of an adapter for PEFT"
            remedy = f'write unset = ["{node.name}"], leave it out of on_finish, and take the export'
            yield node.problem("use", text, remedy)

    def open(self) -> None:
        """UserError if the adapters are none that PEFT has: before the first step, and not after the last."""
        self._format()

    def is_finished(self, step: int) -> bool:
        """Whether the folder, which is never incomplete, is of this step. A collective with one result on all ranks."""
        return bool(run_on_rank0(self.mesh.world, lambda: exported_step(self._target) == step))

    def finish(self, step: int) -> None:
        """Write the folder, each rank the tensors that it owns. A collective: all ranks call it."""
        if self.is_finished(step):
            return
        group = self.mesh.world
        mapper, config = self._format()
        run_on_rank0(group, lambda: remove_folder_at_once(self._target))  # the adapter of an earlier step
        workspace = self.folder.folder / "adapter.workspace" if group.size > 1 else None
        with averaged(self.average):
            mine = own_share(self.stages, mapper, group, workspace, only_inputs=True)
            tensors, _ = run_on_all(group, mine.tensors)
            with get_configs_parallel(tensors, range(group.size), group, workspace) as parts:
                merged = {name: tensor for part in parts for name, tensor in part.items()}
                run_on_rank0(group, lambda: _write(self._target, merged, config, step))
        if workspace is not None and group.rank == 0:
            with suppress(OSError):  # an empty folder does no harm
                workspace.rmdir()

    def _format(self) -> tuple[Mapper, dict[str, Any]]:
        """What maps parameters to PEFT's tensors, and the `adapter_config.json`."""
        whole = adapted_model(self.model, self.stages.local[0].adapters)
        tied = bool(self.model.hugging_face_config().get("tie_word_embeddings"))
        return adapter_mapper(whole, tied), adapter_config(whole, tied, self.base_model)

    @property
    def _target(self) -> Path:
        return self.folder.folder / "adapter"


def _write(target: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], step: int) -> None:
    """Write the folder with one file of tensors, of any shape, which PEFT reads; it appears complete or not at all."""
    temporary = begin_folder(target)
    try:
        write_tensors(temporary.folder / WEIGHTS, tensors)
        (temporary.folder / STATE).write_text(json.dumps({"global_step": step}) + "\n", "utf-8")
        (temporary.folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        temporary.commit()
    finally:
        temporary.discard()


PREFIX = "base_model.model."
"""What PEFT's names of tensors begin with, before transformers' names in memory."""


def adapter_mapper(whole: nn.Module, tied: bool) -> Mapper:
    """Maps parameters of a model with adapters to PEFT's tensors: those of adapters, and of parts tuned in full."""
    layers = [layer.peft_mapper(name) for name, layer in adapted_layers(whole)]
    return parallel(*layers, *(_saved(name, tied) for name in _saved_tensors(whole)))


def adapter_config(whole: nn.Module, tied: bool, base_model: str | None) -> dict[str, Any]:
    """The `adapter_config.json` of a model with adapters. Raises UserError if PEFT has no such adapters."""
    experts = any(name.endswith(".experts") for name, _ in whole.named_modules())
    pairs = [_beside(experts, pair) for name, layer in adapted_layers(whole) for pair in layer.low_ranks(name)]
    if not pairs:
        raise UserError("an adapter for PEFT needs LoRA; for parts tuned in full, remove it, and take the export")
    if len({pair.dora for pair in pairs}) > 1:
        raise UserError("PEFT has DoRA for all layers or for none; write the same `dora` in all adapters")
    fused = [pair for pair in pairs if pair.fused]
    if fused and pairs[0].dora:
        raise UserError(f"PEFT has no DoRA for {fused[0].target}, in a model with experts; take the export")
    # PEFT warns of patterns for fused parameters, though it uses them: theirs are the defaults.
    (rank, scale), _ = Counter((pair.rank, pair.scale) for pair in fused or pairs).most_common(1)[0]
    others = [pair for pair in pairs if (pair.rank, pair.scale) != (rank, scale)]
    dropouts = {pair.dropout for pair in pairs}
    saved = list(dict.fromkeys(name.rpartition(".")[0] for name in _saved_tensors(whole)))
    if tied and EMBEDDING in saved:
        saved.append(HEAD.removesuffix(".weight"))  # PEFT copies modules, which unties them
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        # Always plain LoRA: PEFT 0.21 scales adapters with rslora that it fuses by another rank.
        "lora_alpha": scale * rank,
        "use_rslora": False,
        "use_dora": pairs[0].dora,
        # It is used in training alone, and PEFT refuses it beside fused experts.
        "lora_dropout": dropouts.pop() if len(dropouts) == 1 and not fused else 0.0,
        "target_modules": _targets(whole, [pair for pair in pairs if not pair.fused]),
        "target_parameters": [pair.target for pair in fused] or None,
        "rank_pattern": {pair.target: pair.rank for pair in others},
        "alpha_pattern": {pair.target: pair.scale * pair.rank for pair in others},
        "modules_to_save": saved or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _beside(experts: bool, pair: LowRank) -> LowRank:
    """
    The entry of a module, in a model with experts by its parameter.

    PEFT 0.21 takes modules that are called as projections of experts for these, also where they are no experts.
    """
    if not experts or pair.target.rpartition(".")[2] not in ("gate_proj", "up_proj", "down_proj") or pair.fused:
        return pair
    return attrs.evolve(pair, target=f"{pair.target}.weight", fused=True)


def _targets(whole: nn.Module, pairs: list[LowRank]) -> list[str]:
    """Names for `target_modules`: the last part alone where all modules that end so are adapted, else the whole."""
    adapted = {pair.target for pair in pairs}
    by_end: dict[str, set[str]] = {}
    for name, _ in whole.named_modules():
        by_end.setdefault(name.rpartition(".")[2], set()).add(name)
    short = {end for end, names in by_end.items() if names <= adapted}
    return sorted({end if (end := name.rpartition(".")[2]) in short else name for name in adapted})


def _saved_tensors(whole: nn.Module) -> list[str]:
    """The parameters and buffers of modules that are tuned in full, if only in part: PEFT saves modules."""
    return [
        f"{name}.{leaf}"
        for name, module in whole.named_modules()
        if not isinstance(module, AdaptedLayer)
        if any(parameter.requires_grad for parameter in module.parameters(recurse=False))
        for leaf in persistent_tensors(module)
        if "." not in leaf
    ]


def _saved(name: str, tied: bool) -> Mapper:
    """A tensor of a module that is tuned in full; that of a tied embedding is the head's, too."""
    theirs = [f"{PREFIX}{name}"]
    if tied and name == f"{EMBEDDING}.weight":
        theirs.append(f"{PREFIX}{HEAD}")
    return Mapper((TensorGroup((name,), tuple(theirs), lambda tensors: [*same(tensors)] * len(theirs)),))
