"""Export from the trained model to a folder for Hugging Face's libraries."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import attrs
import torch

from drawloom import Every, NodeView, Problem, at_least, component, setting, wired
from drawloom.components.distributed.rank_errors import run_on_rank0
from drawloom.components.export.missing import find_missing_export
from drawloom.ports import (
    MAX_SHARD,
    AveragedWeights,
    ClassifiableModel,
    EndsAnswers,
    LanguageModel,
    Loss,
    Mesh,
    RunFolder,
    SequenceHead,
    Stages,
    Tokenizer,
    use_averages_if_any,
)

log = logging.getLogger("drawloom.run")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@component(impact="safe")
class HuggingFaceExport:
    """
    Writer for `<run folder>/export/`: config.json, safetensors, the tokenizer files and trainer_state.json.

    trainer_state.json has the weights' step as `global_step`, as in checkpoints from Hugging Face's Trainer. With an
    `average`, the averaged weights are exported. A loss with a head, such as a reward model's, makes it a folder for
    AutoModelForSequenceClassification. After a run on conversations, `eos_token_id` in generation_config.json also has
    the ids at the end of answers.
    """

    model: LanguageModel
    stages: Stages
    folder: RunFolder
    mesh: Mesh
    tokenizer: Tokenizer | None = wired(default=None)
    loss: Loss | None = wired(default=None)
    average: AveragedWeights | None = None
    chats: Every[EndsAnswers] = attrs.field(factory=Every)
    max_shard: int = setting("maximum tensor bytes per file", default=MAX_SHARD, check=at_least(1))
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        "dtype for exported tensors; default: as trained", default=None
    )

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Refuse models without an export, and warn if transformers has no class for a model with a loss's head."""
        model, loss = node.neighbour("model"), node.neighbour("loss")
        yield from find_missing_export(node)
        if model is None or loss is None or not loss.implements(SequenceHead):
            return
        if issubclass(model.component, ClassifiableModel) and not model.component.has_sequence_classifier(model):
            text = f"transformers has no sequence classifier of [{model.name}]'s family, so it can't load the export"
            yield node.warning("use", text, "score with `drawloom score`, or take a model of another family")

    def has_result_of_step(self, step: int) -> bool:
        """Return whether the folder is from this step; it is never incomplete. A collective, with equal results."""
        # imported here, as the rest of an export: a check and the training itself need none of it
        from drawloom.components.export.hf_writer import read_exported_step

        return bool(run_on_rank0(self.mesh.world, lambda: read_exported_step(self._export_folder) == step))

    def run_after_training(self, step: int) -> None:
        """Write the folder; every rank adds its own tensors. A collective over all ranks."""
        if self.has_result_of_step(step):
            return
        from drawloom.components.storage.durable_files import remove_folder_atomically

        # it may have the export of an earlier step
        run_on_rank0(self.mesh.world, lambda: remove_folder_atomically(self._export_folder))
        with use_averages_if_any(self.average):
            self._gather_and_write_folder(self._export_folder, step)
        log.info("exported to %s", self._export_folder)

    def gather_and_export_to(self, target: Path) -> None:
        self._gather_and_write_folder(target)

    def _gather_and_write_folder(self, target: Path, step: int | None = None) -> None:
        """Write the weights of all ranks. A collective over all ranks."""
        from drawloom.components.export.hf_writer import write_hugging_face_folder

        write_hugging_face_folder(
            target,
            self.model,
            self.stages,
            self.tokenizer,
            head=self.loss if isinstance(self.loss, SequenceHead) else None,
            group=self.mesh.world,
            max_shard=self.max_shard,
            dtype=None if self.dtype is None else DTYPES[self.dtype],
            step=step,
            end_ids=frozenset().union(*(chat.answer_end_ids for chat in self.chats.values())),
        )

    @property
    def _export_folder(self) -> Path:
        return self.folder.folder / "export"
