"""verify the checksums of a run's checkpoints"""

import os
from collections.abc import Sequence
from pathlib import Path

from drawloom.components.checkpoint.manifest import FOLDER, CorruptCheckpointError, list_checkpoints, verify_checkpoint
from drawloom.components.commands._trained import missing_checkpoint_error
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph.cli.command import Command, argument, command
from drawloom.graph.cli.exit_codes import FAILED, OK
from drawloom.graph.cli.result import Result, output, output_class
from drawloom.graph.project import Project


@output_class
class CheckpointVerdict:
    """A checkpoint, and whether its files have the checksums of its manifest."""

    path: Path = output("folder of the checkpoint")
    fault: str = output("the first damaged file; empty if the checkpoint is valid")
    files: int = output("number of files; 0 for a damaged checkpoint")
    bytes: int = output("size of all files; 0 for a damaged checkpoint")

    def __str__(self) -> str:
        if self.fault:
            return f"{self.path}: corrupt: {self.fault}"
        return f"{self.path}: valid, {self.files} files, {format_decimal_byte_size(self.bytes)}"


@output_class
class VerifyResult(Result):
    """Checkpoints of a run, oldest first."""

    checkpoints: Sequence[CheckpointVerdict] = output("checkpoints, oldest first")

    @property
    def exit_code(self) -> int:
        """1 if a checkpoint is corrupt."""
        return FAILED if any(checkpoint.fault for checkpoint in self.checkpoints) else OK

    def render(self, format: str) -> str:
        """Return one line per checkpoint."""
        return "\n".join(map(str, self.checkpoints))


@command("runs")
class VerifyCommand(Command):
    """A verification for every checkpoint; the run may continue meanwhile."""

    run_folder: Path = argument("a run folder, such as runs/first_run")

    def run(self, project: Project) -> VerifyResult:
        checkpoints = list_checkpoints(self.run_folder / FOLDER)
        if not checkpoints:
            raise missing_checkpoint_error(self.run_folder)
        return VerifyResult([verdict for path in checkpoints if (verdict := _make_checkpoint_verdict(path))])


def _make_checkpoint_verdict(checkpoint: Path) -> CheckpointVerdict | None:
    """Compare a checkpoint's files with its manifest; return None if the run has meanwhile removed it."""
    try:
        manifest = verify_checkpoint(checkpoint)
    except CorruptCheckpointError as error:
        return CheckpointVerdict(checkpoint, str(error), 0, 0) if os.path.lexists(checkpoint) else None
    return CheckpointVerdict(checkpoint, "", len(manifest.files), manifest.total_file_bytes)
