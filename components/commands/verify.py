"""verify the checksums of a run's checkpoints"""

import argparse
import os
from pathlib import Path

from drawloom.components.checkpoint.manifest import FOLDER, CorruptCheckpointError, list_checkpoints, verify
from drawloom.components.commands._trained import no_checkpoint
from drawloom.components.storage.byte_size import byte_size
from drawloom.graph.cli.terminal import print_text
from drawloom.graph.project import Project


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    parser.add_argument("run_folder", metavar="RUN_FOLDER", type=Path, help="a run folder, such as runs/first_run")


def main(options: argparse.Namespace, _project: Project) -> int:
    """Print one line per checkpoint; return 1 if any is corrupt. The run may continue meanwhile."""
    checkpoints = list_checkpoints(options.run_folder / FOLDER)
    if not checkpoints:
        raise no_checkpoint(options.run_folder)
    lines = [line for checkpoint in checkpoints if (line := _line(checkpoint))]
    print_text("\n".join(lines))
    return int(any("corrupt" in line for line in lines))


def _line(checkpoint: Path) -> str:
    """Return a checkpoint's line, empty if the run has removed it meanwhile."""
    try:
        manifest = verify(checkpoint)
    except CorruptCheckpointError as error:
        return f"{checkpoint}: corrupt: {error}" if os.path.lexists(checkpoint) else ""
    return f"{checkpoint}: valid, {len(manifest.files)} files, {byte_size(manifest.bytes)}"
