"""export a run's weights as a Hugging Face folder"""

from contextlib import closing
from datetime import date
from pathlib import Path
from typing import Any

from drawloom import UserError
from drawloom.components.commands._trained import (
    CheckpointCommand,
    find_base_folder_of_run,
    find_chat_template,
    get_if_any,
)
from drawloom.components.data.template_prompts import TemplatePrompts
from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.graph.cli.command import Project, Result, command, option, output, output_class
from drawloom.ports import EndsAnswers, LanguageModel, Loss, ModelWithoutExport, Stages, Tokenizer


@output_class
class ExportResult(Result):
    """A Hugging Face folder with the weights of a run."""

    folder: Path = output("written folder")
    step: int = output("step of the checkpoint")

    def render(self, format: str) -> str:
        """Return one line."""
        return f"exported to {self.folder}"


@command
class ExportCommand(CheckpointCommand):
    """An export with a checkpoint's weights."""

    to: Path = option("folder to write; it must not exist", metavar="DIR")

    def run(self, project: Project) -> ExportResult:
        with self.open_run(project, LanguageModel, Stages, Loss, every=(Tokenizer,)) as run:
            model = run.nodes.get(LanguageModel)
            tokenizer: Any = get_if_any(run.nodes, Tokenizer)
            if isinstance(model, ModelWithoutExport):
                raise UserError(f"{run.folder} can't be exported: transformers has no class for its model", exit_code=2)
            # In place of corpora, whose files may be gone.
            prompts = TemplatePrompts(tokenizer=tokenizer, template=find_chat_template(run.nodes), date=date.today())
            with closing(prompts):
                write_hugging_face_folder(
                    self.to,
                    model,
                    run.nodes.get(Stages),
                    tokenizer,
                    loss=run.nodes.get(Loss),
                    base=find_base_folder_of_run(run.folder),
                    step=run.step,
                    chats=[prompts] * bool(run.nodes.graph.implementers(EndsAnswers)),
                )
        return ExportResult(self.to, run.step)
