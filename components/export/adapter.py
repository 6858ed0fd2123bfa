"""Exports a run's adapters in PEFT's format."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from drawloom import NodeView, Problem, UserError, component, setting
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.export.folder import FolderExport
from drawloom.components.export.shard_writer import gather_tensors_on_first_rank, make_share_on_all_ranks
from drawloom.components.storage.safetensors.writer import write_safetensors_file
from drawloom.components.storage.temp_folders import create_temp_folder
from drawloom.components.weights.adapted import build_meta_model_with_adapters
from drawloom.components.weights.load import folder_fingerprint
from drawloom.components.weights.peft import BASE_KEY, WEIGHTS, PeftFormat
from drawloom.ports import (
    ADAPTER_CONFIG,
    STATE,
    Settings,
    run_log,
    trains_base_weights,
)


@component(impact="safe")
class AdapterExport(FolderExport):
    """
    Writer for `<run folder>/adapter/`, for PEFT to load over the run's base model; without adapters it writes nothing.

    The export is exact, while merging adapters into narrow weights rounds their changes. Fully tuned modules are in
    `modules_to_save`. All experts share one tensor, as in transformers 5. With an `average`, the averaged weights are
    exported.
    """

    folder_name: ClassVar[str] = "adapter"

    base_model: str | None = setting("base model's name or path for adapter_config.json", default=None)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield problems for adapters without LoRA, and for new tokens: PEFT would look for them in the base model."""
        yield from super().constraints(node)
        stages = node.neighbour("stages")
        adapters = stages.neighbours("adapters") if stages else []
        edits = f'unset = ["{node.name}"], and remove = "@{node.name}" in [edit.trainer.on_finish]'
        remedy = f"write {edits}; take the export"
        if stages and adapters and all(trains_base_weights(adapter.component) for adapter in adapters):
            text = f"an adapter for PEFT needs LoRA, and [{stages.name}] tunes only whole modules"
            yield node.problem("use", text, remedy)
        if adapters and (model := node.neighbour("model")) and model.settings.get("new_tokens"):
            text = f"[{model.name}] has new tokens, which are no part of an adapter for PEFT"
            yield node.problem("use", text, remedy)

    def check_before_open(self) -> None:
        """Raise UserError if PEFT does not support the adapters."""
        if not self.stages.adapters:
            return
        try:
            peft_format = self._create_format()
        except UserError:
            return  # a problem of the stages
        peft_format.make_config(self.base_model)

    def open(self) -> None:
        """Log if there is nothing to export."""
        if not self.stages.adapters:
            run_log.info("all weights are trained, without adapters, so there is no folder %s", self._target)

    def has_result_of_step(self, step: int) -> bool:
        """Return whether there are no adapters, or the folder is from this step. A collective, with equal results."""
        return not self.stages.adapters or super().has_result_of_step(step)

    def _gather_and_write_folder(self, target: Path, step: int | None = None) -> None:
        group, peft_format, base = self.mesh.world, self._create_format(), self.stages.initial_folder
        config = peft_format.make_config(self.base_model)
        share = make_share_on_all_ranks(self.stages, peft_format.mapper, group, only_inputs=True)
        tensors = gather_tensors_on_first_rank(share.gather_and_convert_tensors, group)
        run_on_rank0(group, lambda: _write_adapter_folder(target, tensors, config, base, step))

    def _create_format(self) -> PeftFormat:
        """Return PEFT's format for the model. Raises UserError for adapters that do not fit it."""
        whole = build_meta_model_with_adapters(self.model, self.stages.adapters)
        return PeftFormat.create(self.model, whole, self.stages.initial_folder)


def _write_adapter_folder(
    target: Path, tensors: Mapping[str, Tensor], config: Settings, base: Path | None, step: int | None
) -> None:
    """
    Write the folder with one tensor file for PEFT, any shapes; the folder appears complete or not at all.

    Its state has a fingerprint of the weights in the folder `base`.
    """
    temporary = create_temp_folder(target)
    try:
        write_safetensors_file(temporary.folder / WEIGHTS, tensors)
        state = {"global_step": step, **({BASE_KEY: folder_fingerprint(base)} if base else {})}
        (temporary.folder / STATE).write_text(json.dumps(state) + "\n", "utf-8")
        (temporary.folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n", "utf-8")
        temporary.commit()
    finally:
        temporary.discard()
