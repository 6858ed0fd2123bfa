"""The check of decays of running means."""

from drawloom.graph import between


def check_betas(value: tuple[float, float]) -> str | None:
    """Why a pair of decays can't be, or None: each is from 0 to below 1."""
    return next((reason for beta in value if (reason := between(0, 1)(beta))), None)
