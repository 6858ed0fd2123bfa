"""A vocabulary that is split over ranks: what each of them finds out about its part, put together by one exchange."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

NOT_HERE = -1


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of the output weight that this rank holds begin with that of token `first`; the group has all rows."""

    first: int
    group: dist.ProcessGroup


def local_targets(targets: Tensor, rows: int, ignored: int, part: VocabularyPart | None) -> Tensor:
    """Which of this rank's rows each target (int64) is; -1 where it is another rank's, or ignored."""
    learned = targets != ignored
    if part is None:
        return targets.where(learned, NOT_HERE)
    own = targets - part.first
    return own.where(learned & (own >= 0) & (own < rows), NOT_HERE)


def all_gather_lse(totals: Tensor, chosen: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """
    Over the whole vocabulary: the log of the sum of exp(logits) by token, and the logit of each token's target.

    Both are float32 (tokens,) of this rank's part, the latter 0 where the target is not here.
    """
    if part is None:
        return totals, chosen
    mine = torch.stack((totals, chosen))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(part.group))]
    dist.all_gather(every, mine, group=part.group)
    of_all = torch.stack(every)
    return of_all[:, 0].logsumexp(0), of_all[:, 1].sum(0)


def all_reduce(gradient: Tensor, part: VocabularyPart | None) -> Tensor:
    """The sum over all parts of a gradient of what each rank has whole."""
    if part is not None:
        dist.all_reduce(gradient, group=part.group)
    return gradient
