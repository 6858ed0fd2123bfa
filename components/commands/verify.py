"""read every checkpoint of a run, and say which are as they were committed"""

import argparse
from pathlib import Path

from drawloom.components.checkpoint.io_errors import size
from drawloom.components.checkpoint.manifest import FOLDER, CorruptCheckpoint, committed, verify
from drawloom.graph import UserError
from drawloom.graph.cli.project import Project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=Path, help="such as runs/first_run")


def main(options: argparse.Namespace, _project: Project) -> int:
    """A line for each; 1 if any is damaged. The run itself is not touched, and may go on meanwhile."""
    checkpoints = committed(options.run_folder / FOLDER)
    if not checkpoints:
        raise UserError(
            f"{options.run_folder} holds no checkpoint; give the folder of a run, such as runs/first_run", 2
        )
    lines = [line for checkpoint in checkpoints if (line := _line(checkpoint))]
    print("\n".join(lines))
    return int(any("damaged" in line for line in lines))


def _line(checkpoint: Path) -> str:
    """What is to be said of a checkpoint; nothing if the run has removed it meanwhile."""
    try:
        manifest = verify(checkpoint)
    except CorruptCheckpoint as error:
        return f"{checkpoint}: damaged: {error}" if checkpoint.exists() else ""
    return f"{checkpoint}: whole, {len(manifest.files)} files, {size(manifest.bytes)}"
