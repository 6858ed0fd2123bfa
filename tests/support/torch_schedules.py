"""The orders of `torch.distributed.pipelining`, without stages or processes: an oracle for ours."""

import csv
import io
from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


def make_schedule(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> Any:
    """A schedule of torch's, with no more to it than orders need."""
    cls = getattr(schedules, name)
    found = cls.__new__(cls)
    found.pp_group_size, found.n_local_stages, found._n_microbatches = ranks, stages_per_rank, microbatches
    found._stages = [SimpleNamespace() for _ in range(stages_per_rank)]
    found.num_stages = found._num_stages = ranks * stages_per_rank
    found.number_of_rounds = max(1, microbatches // ranks)
    found.microbatches_per_round = microbatches // found.number_of_rounds
    style = "v" if name in V else "loop"
    found.stage_index_to_group_rank = generate_stage_to_rank_mapping(ranks, found.num_stages, style=style)
    found._defer_pp_recv = False
    return found


def order(name: str, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[str]]:
    """Each rank's work, by labels in our notation, without slots in which nothing is done."""
    found = make_schedule(name, ranks, stages_per_rank, microbatches)
    if hasattr(found, "_calculate_single_rank_operations"):
        lines = {rank: found._calculate_single_rank_operations(rank) for rank in range(ranks)}
    else:
        lines = found._get_pipeline_order()
    return [[label for action in lines[rank] if (label := _label(action))] for rank in range(ranks)]


def lower(table: str, ranks: int, stages_per_rank: int, microbatches: int) -> tuple[str, tuple[int, ...]]:
    """A CSV text read, checked and given sends and receives by torch, as CSV again; and whose each stage is."""
    found = make_schedule("ScheduleZBVZeroBubble", ranks, stages_per_rank, microbatches)
    rows = enumerate(csv.reader(io.StringIO(table)))
    found._prepare_schedule_with_comms({rank: [schedules._Action.from_str(cell) for cell in row] for rank, row in rows})
    text = io.StringIO()
    csv.writer(text).writerows(found.pipeline_order_with_comms.values())
    return text.getvalue(), tuple(rank for _, rank in sorted(found.stage_index_to_group_rank.items()))


def _label(action: Any) -> str:
    if action is None or action.computation_type == schedules.REDUCE_GRAD:
        return ""
    return "|".join(map(repr, action.sub_actions)) if action.sub_actions else repr(action)
