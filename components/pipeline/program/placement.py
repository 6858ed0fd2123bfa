"""Which rank holds which stage."""


def loop(ranks: int, stages_per_rank: int = 1) -> tuple[int, ...]:
    """Round and round: the last rank hands over to the first. The rank of each stage."""
    return tuple(range(ranks)) * stages_per_rank


def vee(ranks: int) -> tuple[int, ...]:
    """
    Down and up again, two stages a rank: the rank of each stage.

    The last rank hands over to itself, and the first one holds both ends of the model.
    """
    return (*range(ranks), *reversed(range(ranks)))


def stages_of(rank: int, owners: tuple[int, ...]) -> list[int]:
    """A rank's stages, in order."""
    return [stage for stage, owner in enumerate(owners) if owner == rank]
