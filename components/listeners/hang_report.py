"""Hang report: the process's threads' stacks in its log, and a diagnosis for all ranks."""

import faulthandler
import threading

from drawloom.components.listeners.log_handlers import open_log_for_appending, prepare_rank_log_path
from drawloom.ports import Mesh, Processes, RunFolder

REPORT_TIMEOUT = 5.0  # seconds for the message and the stacks, which may hang on the same disk as the run


def report_hang_and_must_exit(delay: str, folder: RunFolder, mesh: Mesh, processes: Processes) -> bool:
    """
    Write the threads' stacks to the rank's log, and report the hang with a diagnosis to all ranks.

    Returns False if the run goes on without other ranks, and this process need not end.
    """
    survivable_delays: list[str] = []

    def write_stacks_and_report() -> None:
        path, rank = prepare_rank_log_path(folder, mesh), mesh.world.rank
        with open_log_for_appending(path) as file:
            faulthandler.dump_traceback(file, all_threads=True)
        diagnosis = processes.diagnose_hang()
        why = f"; {diagnosis}" if diagnosis else ""
        if not processes.fail_ranks_and_must_exit(f"rank {rank} hangs: {delay}{why}; stacks are in {path}"):
            survivable_delays.append(delay)

    reporter = threading.Thread(target=write_stacks_and_report, name="hang report", daemon=True)
    reporter.start()
    reporter.join(REPORT_TIMEOUT)
    return not survivable_delays
