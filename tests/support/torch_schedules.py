"""Orders of `torch.distributed.pipelining`, without stages or processes: an oracle for ours."""

import csv
import io
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def make_schedule(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Any:
    """Return one of torch's schedules, with only the attributes needed for its orders."""
    cls = getattr(schedules, name)
    schedule = cls.__new__(cls)
    schedule.pp_group_size, schedule.n_local_stages, schedule._n_microbatches = ranks, stages_per_rank, microbatches
    schedule._stages = [SimpleNamespace() for _ in range(stages_per_rank)]
    schedule.num_stages = schedule._num_stages = ranks * stages_per_rank
    schedule.number_of_rounds = max(1, microbatches // ranks)
    schedule.microbatches_per_round = microbatches // schedule.number_of_rounds
    style = "v" if name in V else "loop"
    schedule.stage_index_to_group_rank = generate_stage_to_rank_mapping(ranks, schedule.num_stages, style=style)
    schedule._defer_pp_recv = schedule._defer_reduce_grad_wait = False  # as torch 2.15 has them by default
    schedule._max_active_stages, schedule._unshard_lookahead, schedule._max_outstanding_sends = 3, "full", None
    return schedule


def order(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[str]]:
    """Return each rank's work, by labels in our notation, without idle slots."""
    schedule = make_schedule(name, ranks, stages_per_rank, microbatches)
    if hasattr(schedule, "_calculate_single_rank_operations"):
        lines = {rank: schedule._calculate_single_rank_operations(rank) for rank in range(ranks)}
    else:
        lines = schedule._get_pipeline_order()
    return [[label for action in lines[rank] if (label := _label(action))] for rank in range(ranks)]


def lower(table: str, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[str, tuple[int, ...]]:
    """Let torch read a CSV text, check it and add sends and receives; return it as CSV, and each stage's rank."""
    schedule = make_schedule("ScheduleZBVZeroBubble", ranks, stages_per_rank, microbatches)
    rows = enumerate(csv.reader(io.StringIO(table)))
    schedule._prepare_schedule_with_comms(
        {rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in rows}
    )
    text = io.StringIO()
    csv.writer(text).writerows(schedule.pipeline_order_with_comms.values())
    return text.getvalue(), tuple(rank for _, rank in sorted(schedule.stage_index_to_group_rank.items()))


def _label(action: Any) -> str:
    if action is None or action.computation_type.value in ("REDUCE_GRAD", "WAIT_REDUCE_GRAD"):
        return ""
    return "|".join(map(repr, action.sub_actions)) if action.sub_actions else repr(action)
