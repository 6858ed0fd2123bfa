"""Export from the trained model to a folder for Hugging Face's libraries."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

import attrs
import torch

from drawloom import Every, NodeView, Problem, at_least, component, setting, wired
from drawloom.components.export.folder import FolderExport
from drawloom.ports import (
    MAX_SHARD,
    ClassifiableModel,
    EndsAnswers,
    Loss,
    Scorer,
    Tokenizer,
    run_log,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@component(impact="safe")
class HuggingFaceExport(FolderExport):
    """
    Writer for `<run folder>/export/`: config.json, safetensors, the tokenizer files and trainer_state.json.

    trainer_state.json has the weights' step as `global_step`, as in checkpoints from Hugging Face's Trainer. With an
    `average`, the averaged weights are exported. A loss with a head, such as a reward model's, makes it a folder for
    AutoModelForSequenceClassification. After a run on conversations, `eos_token_id` in generation_config.json also has
    the ids at the end of answers, and a `template` of the conversations is the folder's.
    """

    folder_name: ClassVar[str] = "export"

    tokenizer: Tokenizer | None = wired(default=None)
    loss: Loss | None = wired(default=None)
    chats: Every[EndsAnswers] = attrs.field(factory=Every)
    max_shard: int = setting("maximum tensor bytes per file", default=MAX_SHARD, check=at_least(1))
    dtype: Literal["float32", "bfloat16", "float16"] | None = setting(
        "dtype for exported tensors; default: as trained", default=None
    )

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Refuse models without an export, and warn if transformers has no class for a model with a loss's head."""
        model, loss = node.neighbour("model"), node.neighbour("loss")
        yield from super().constraints(node)
        if model is None or loss is None or not loss.implements(Scorer):
            return
        if issubclass(model.component, ClassifiableModel) and not model.component.has_sequence_classifier(model):
            text = f"transformers has no sequence classifier of [{model.name}]'s family, so it can't load the export"
            yield node.warning("use", text, "score with `drawloom score`, or take a model of another family")

    def gather_and_export_to(self, target: Path) -> None:
        self._gather_and_write_folder(target)

    def _gather_and_write_folder(self, target: Path, step: int | None = None) -> None:
        from drawloom.components.export.hf_writer import write_hugging_face_folder

        write_hugging_face_folder(
            target,
            self.model,
            self.stages,
            self.tokenizer,
            loss=self.loss,
            group=self.mesh.world,
            max_shard=self.max_shard,
            dtype=None if self.dtype is None else DTYPES[self.dtype],
            step=step,
            chats=[*self.chats.values()],
        )
        run_log.info("exported to %s", target)
