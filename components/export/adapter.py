"""Exports the adapters of a run in PEFT's format."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.export.hf_writer import STATE, exported_step
from drawloom.components.export.peft_format import adapter_config, adapter_mapper
from drawloom.components.export.shard_writer import write_stages
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.model import AveragedWeights, Model, Stages, averaged
from drawloom.components.ports.run import RunFolder
from drawloom.components.storage.atomic_write import remove_folder
from drawloom.components.storage.safetensors.reader import INDEX, open_safetensors_folder
from drawloom.components.storage.safetensors.writer import new_safetensors_file
from drawloom.components.weights.adapted import adapted_model
from drawloom.components.weights.save import PlannedFile
from drawloom.graph import Problem, component, setting
from drawloom.graph.build.node import NodeView

WEIGHTS = "adapter_model.safetensors"


@component(impact="safe")
class AdapterExport:
    """
    Writes `<run folder>/adapter/`, which PEFT loads over the model that the run started from.

    It is exact, where merging adapters into narrow weights rounds their changes. Parts that are tuned in full are in
    it as `modules_to_save`. Experts have one tensor for all, as in transformers 5. With an `average`, what is written
    is averaged.
    """

    model: Model
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
        for model in node.neighbours("model"):
            if model.settings.get("new_tokens"):
                text = f"[{model.name}] has new tokens, which are no part of an adapter for PEFT"
                yield node.problem(
                    "use", text, f'write unset = ["{node.name}"], leave it out of on_finish, and take the export'
                )

    def is_finished(self, step: int) -> bool:
        """Whether the folder, which is never incomplete, is of this step. A collective with one result on all ranks."""
        return bool(run_on_rank0(self.mesh.world, lambda: exported_step(self._target) == step))

    def finish(self, step: int) -> None:
        """
        Write the folder, each rank the tensors that it owns. A collective: all ranks call it.

        Raises UserError if the adapters are none that PEFT has.
        """
        if self.is_finished(step):
            return
        group = self.mesh.world
        whole = adapted_model(self.model, self.stages.local[0].adapters)
        tied = bool(self.model.hugging_face_config().get("tie_word_embeddings"))
        config = adapter_config(whole, tied, self.base_model)
        run_on_rank0(group, lambda: remove_folder(self._target))  # the adapter of an earlier step
        workspace = self.folder.folder / "adapter.workspace" if group.size > 1 else None

        def complete(folder: Path, files: list[PlannedFile]) -> None:
            _join(folder, files)
            (folder / STATE).write_text(json.dumps({"global_step": step}) + "\n", "utf-8")
            (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")

        mapper = adapter_mapper(whole, tied)
        with averaged(self.average):
            write_stages(self._target, self.stages, mapper, complete, group, workspace, only_inputs=True)
        if workspace is not None and group.rank == 0:
            with suppress(OSError):  # an empty folder does no harm
                workspace.rmdir()

    @property
    def _target(self) -> Path:
        return self.folder.folder / "adapter"


def _join(folder: Path, files: list[PlannedFile]) -> None:
    """Make one file of those that the ranks have written: PEFT reads one."""
    source = open_safetensors_folder(folder)
    specs = source.specs()
    with new_safetensors_file(folder / WEIGHTS, specs) as writer:
        for name in specs:
            writer.write(name, source.tensor(name))
    for name in (*(file.name for file in files), INDEX):
        (folder / name).unlink(missing_ok=True)
