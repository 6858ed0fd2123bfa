"""What every way of batching does."""

from drawloom.components.ports.run import Batching
from drawloom.graph.testing import expect


def sizes_multiply(batching: Batching) -> None:
    """Microbatches of all replicas make exactly the rows of a step."""
    rows = batching.microbatches * batching.micro_size * batching.dp_size
    expect(rows == batching.global_size, f"{rows} rows make a step of {batching.global_size}")
    expect(0 <= batching.dp_rank < batching.dp_size, f"replica {batching.dp_rank} is none of {batching.dp_size}")


def every_place_is_taken_once(batching: Batching) -> None:
    """The places of a replica lie in the step's part of the endless order, and no step takes one again."""
    seen: set[int] = set()
    for step in (1, 2, 3):
        microbatches = batching.positions(step)
        places = [place for microbatch in microbatches for place in microbatch]
        sizes = {len(microbatch) for microbatch in microbatches}
        expect(
            sizes == {batching.micro_size} and len(microbatches) == batching.microbatches, "a step has another shape"
        )
        inside = range((step - 1) * batching.global_size, step * batching.global_size)
        expect(all(place in inside for place in places), f"step {step} takes places of another")
        expect(len(set(places)) == len(places) and not seen & set(places), f"step {step} takes a place twice")
        seen |= set(places)
