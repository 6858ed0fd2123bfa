"""export a run's weights as a Hugging Face folder"""

from contextlib import ExitStack, closing
from pathlib import Path

from drawloom import UserError
from drawloom.components.commands._trained import CheckpointCommand, find_base_folder_of_run, get_if_any
from drawloom.components.data.chat.corpus import ChatCorpus
from drawloom.components.data.template_prompts import TemplatePrompts
from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.graph.cli.command import Project, Result, command, option, output, output_class
from drawloom.graph.runtime.container import Container
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
        ports = (LanguageModel, Stages, Loss)
        with ExitStack() as stack, self.open_run(project, *ports, every=(Tokenizer, EndsAnswers)) as run:
            chats = [stack.enter_context(closing(prompts)) for prompts in _make_prompts_for_corpora(run.nodes)]
            model = run.nodes.get(LanguageModel)
            if isinstance(model, ModelWithoutExport):
                raise UserError(f"{run.folder} can't be exported: transformers has no class for its model", exit_code=2)
            write_hugging_face_folder(
                self.to,
                model,
                run.nodes.get(Stages),
                get_if_any(run.nodes, Tokenizer),
                loss=run.nodes.get(Loss),
                base=find_base_folder_of_run(run.folder),
                step=run.step,
                chats=[*chats, *(node for node in run.nodes.values() if isinstance(node, EndsAnswers))],
            )
        return ExportResult(self.to, run.step)


def _make_prompts_for_corpora(nodes: Container) -> list[TemplatePrompts]:
    """Return encoders with the chat templates of the recipe's corpora, whose files may be gone."""
    corpora = [node for node in nodes.graph.nodes.values() if issubclass(node.spec.cls, ChatCorpus)]
    return [
        TemplatePrompts(
            tokenizer=nodes[node.edges["tokenizer"].targets[0]],
            template=node.settings["template"],
            date=node.settings["date"],
        )
        for node in corpora
    ]
