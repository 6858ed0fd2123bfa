"""export a run's weights as a Hugging Face folder"""

import argparse
from pathlib import Path

from drawloom.components.commands._trained import add_run, open_trained
from drawloom.components.export.hf_writer import write_folder
from drawloom.components.ports.corpus import Tokenizer
from drawloom.components.ports.model import LanguageModel
from drawloom.components.ports.stages import Stages
from drawloom.graph.cli.terminal import print_text
from drawloom.graph.project import Project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    add_run(parser)
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="folder to write; it must not exist")


def main(options: argparse.Namespace, project: Project) -> int:
    """Export the weights, and print the folder's path."""
    with open_trained(project, options, LanguageModel, Stages, Tokenizer) as (run, step):
        write_folder(options.to, run.get(LanguageModel), run.get(Stages), run.get(Tokenizer), step=step)
    print_text(f"exported to {options.to}")
    return 0
