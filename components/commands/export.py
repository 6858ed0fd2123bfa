"""export a run's weights as a Hugging Face folder"""

import argparse
from pathlib import Path

from drawloom.components.commands._trained import (
    add_run_and_checkpoint_arguments,
    find_base_folder_of_run,
    get_if_any,
    open_trained_run,
)
from drawloom.components.export.hf_writer import write_hugging_face_folder
from drawloom.components.ports.corpus import EndsAnswers, Tokenizer
from drawloom.components.ports.model import LanguageModel
from drawloom.components.ports.pipeline import Loss, SequenceHead
from drawloom.components.ports.stages import Stages
from drawloom.graph.cli.result import Result, output, output_class
from drawloom.graph.project import Project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    add_run_and_checkpoint_arguments(parser)
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="folder to write; it must not exist")


@output_class
class ExportResult(Result):
    """A Hugging Face folder with the weights of a run."""

    folder: Path = output("written folder")
    step: int = output("step of the checkpoint")

    def render(self, format: str) -> str:
        """Return one line."""
        return f"exported to {self.folder}"


def main(options: argparse.Namespace, project: Project) -> ExportResult:
    """Export the weights."""
    ports = (LanguageModel, Stages, Loss)
    with open_trained_run(project, options, *ports, every=(Tokenizer, EndsAnswers)) as (run, step):
        loss = run.get(Loss)
        ends = [node.answer_end_ids for node in run.values() if isinstance(node, EndsAnswers)]
        write_hugging_face_folder(
            options.to,
            run.get(LanguageModel),
            run.get(Stages),
            get_if_any(run, Tokenizer),
            head=loss if isinstance(loss, SequenceHead) else None,
            base=find_base_folder_of_run(options.run_folder),
            step=step,
            end_ids=frozenset().union(*ends),
        )
    return ExportResult(options.to, step)
