"""Hang diagnosis: which ranks block the others, by the ranks' reported status when a rank times out."""

from collections.abc import Mapping

import attrs

NOT_BLOCKED = "is not in a collective"


@attrs.frozen
class RankStatus:
    """
    Rank status: its location, and the collective that blocks its main thread ("" for none).

    `thread_blocked_in` is the collective that blocks a background thread.
    """

    location: str = ""
    blocked_in: str = ""
    thread_blocked_in: str = ""

    @property
    def is_blocked(self) -> bool:
        """Whether any thread is blocked in a collective."""
        return bool(self.blocked_in or self.thread_blocked_in)


def is_waited_for(rank: int, answers: Mapping[int, RankStatus]) -> bool:
    """Return whether other ranks are blocked and this one is not."""
    # with NCCL the GPU waits and no host thread, so that no rank counts as blocked
    return not answers[rank].is_blocked and any(answer.is_blocked for answer in answers.values())


def format_hang_diagnosis(answers: Mapping[int, RankStatus], size: int) -> str:
    """Name the ranks without an answer; without any, the ranks outside collectives; else every rank's collective."""
    if silent := [rank for rank in range(size) if rank not in answers]:
        return f"{_format_ranks(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    busy = {rank: answer for rank, answer in answers.items() if not answer.blocked_in}
    busy = {rank: answer for rank, answer in busy.items() if not answer.thread_blocked_in} or busy
    if 0 < len(busy) < size:
        return "; ".join(
            f"rank {rank}{_format_location(answer)} {NOT_BLOCKED}" for rank, answer in sorted(busy.items())
        )
    return "; ".join(
        f"rank {rank}{_format_location(answer)} {answer.blocked_in or NOT_BLOCKED}"
        for rank, answer in sorted(answers.items())
    )


def _format_location(answer: RankStatus) -> str:
    """Return a rank's step and phase in parentheses, or "" if unknown."""
    return f" ({answer.location})" if answer.location else ""


def _format_ranks(ranks: list[int]) -> str:
    """Return `rank 3`, or `ranks 1, 3` if there are several."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
