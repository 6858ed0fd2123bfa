"""Base class for exports: a folder in the run folder, written after training."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from drawloom import NodeView, Problem
from drawloom.graph import component_base_class
from drawloom.ports import (
    AveragedWeights,
    LanguageModel,
    Mesh,
    ModelWithoutExport,
    RunFolder,
    Stages,
    use_averages_if_any,
)


@component_base_class
class FolderExport(ABC):
    """Writer for the folder `folder_name` with the model's weights, or with its averaged weights."""

    folder_name: ClassVar[str]

    model: LanguageModel
    stages: Stages
    folder: RunFolder
    mesh: Mesh
    average: AveragedWeights | None = None

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield the problem if the model can't be exported."""
        if (model := node.neighbour("model")) and issubclass(model.component, ModelWithoutExport):
            text = f"[{model.name}] can't be exported: {model.component.explain_missing_export(model)}"
            remedy = f'write unset = ["{node.name}"], and remove = "@{node.name}" in [edit.trainer.on_finish]'
            yield node.problem("use", text, remedy)

    def has_result_of_step(self, step: int) -> bool:
        """Return whether the folder is from this step; it is never incomplete. A collective, with equal results."""
        # imported here, as the rest of an export: a check and the training itself need none of it
        from drawloom.components.distributed.rank_errors import run_on_rank0
        from drawloom.components.export.hf_writer import read_exported_step

        return bool(run_on_rank0(self.mesh.world, lambda: read_exported_step(self._target) == step))

    def run_after_training(self, step: int) -> None:
        """Write the folder; every rank adds its own tensors. A collective over all ranks."""
        if self.has_result_of_step(step):
            return
        from drawloom.components.distributed.rank_errors import run_on_rank0
        from drawloom.components.storage.temp_folders import remove_folder_atomically

        # it may have the export of an earlier step
        run_on_rank0(self.mesh.world, lambda: remove_folder_atomically(self._target))
        with use_averages_if_any(self.average):
            self._gather_and_write_folder(self._target, step)

    @abstractmethod
    def _gather_and_write_folder(self, target: Path, step: int | None = None) -> None:
        """Write the weights of all ranks, after this step if it is known. A collective over all ranks."""

    @property
    def _target(self) -> Path:
        return self.folder.folder / self.folder_name
