"""Check that data sets write every batch leaf read by components."""

from collections.abc import Iterator

from drawloom import NodeView, Problem
from drawloom.ports import Batch, ReadsLeaves, find_batch_types


def find_missing_batch_leaves(trainer: NodeView) -> Iterator[Problem]:
    """
    Yield a problem for every component with a leaf missing from the run's batches.

    A phase that makes batches, such as one of rollouts, replaces those of the data set.
    """
    phases = {node.name for node in trainer.neighbours("phases")}
    writers = [*find_batch_types(trainer)]
    writers = [writer for writer in writers if writer[0].name in phases] or writers
    for reader in trainer.reachable():
        if isinstance(reader.component, ReadsLeaves):
            for writer, batch_type in writers:
                yield from _check_leaves(reader, reader.component.batch_leaves, writer, batch_type)


def _check_leaves(
    reader: NodeView, leaves: tuple[str, ...], writer: NodeView, batch_type: type[Batch]
) -> Iterator[Problem]:
    """Yield a problem if the batches from `writer` lack leaves that `reader` needs."""
    if missing := [name for name in leaves if name not in batch_type.specs]:
        plural = "leaves" if len(missing) > 1 else "leaf"
        text = (
            f"[{reader.name}] reads the {plural} {', '.join(missing)} of batches, and [{writer.name}] makes "
            f"{batch_type.__name__}, which has {', '.join(batch_type.specs)}"
        )
        yield reader.problem("use", text, f"use another component in [{reader.name}] or in [{writer.name}]")
