"""Row record by step, for `drawloom data audit`."""

from drawloom import component
from drawloom.components.data.batch_checks import compute_row_digests
from drawloom.components.storage.durable_files import create_folder_unless_link
from drawloom.components.storage.step_log import StepLog, StepLogWriter
from drawloom.ports import Batching, Mesh, RunFolder, Step

FOLDER = "rows"


@component(reads=("batches",), impact="safe")
class Record(StepLogWriter):
    """
    Writer for `rows/rank-N.jsonl` in the run folder: one object per step, with a digest per row on this rank.

    The phase follows the data loading phase. A digest covers all tensors in a row, so the record shows the trained
    rows, not the requested rows.
    """

    folder: RunFolder
    mesh: Mesh
    batching: Batching

    def run_phase(self, step: Step) -> None:
        """Append a step's digests. Removes later lines from a process that was killed or went back."""
        digests = [digest for batch in step.state["batches"] for digest in compute_row_digests(batch)]
        self.append(
            {"step": step.index, "part": self.batching.dp_rank, "parts": self.batching.dp_size, "rows": digests}
        )

    def open_before(self, step: int) -> StepLog:
        """Open this rank's file, after rank 0 has removed lines from this step on in all files. A collective."""
        folder = create_folder_unless_link(self.folder.folder / FOLDER)
        if self.mesh.world.rank == 0:
            # all ranks: an earlier start may have had more ranks than this one
            for path in folder.glob("rank-*.jsonl"):
                StepLog.open_before(path, step).close()
        self.mesh.world.gather_json(None)  # a barrier: no rank appends before the files are cut
        return StepLog.open(folder / f"rank-{self.mesh.world.rank}.jsonl")
