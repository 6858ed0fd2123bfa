"""Cost of wiring: CPU time to read, check and build 10 to 10000 nodes, compared with hand-written constructors."""

from drawloom.graph.project import Project
from support.cpu_time import by_turns_ms
from support.layered import by_hand, by_recipe, recipe_text

LIMITS = {1000: 15, 10000: 20}
"""Node count -> highest allowed ratio of the recipe's time to the hand-written constructors' time."""


def main() -> None:
    """Print a row per node count, and fail if a ratio exceeds its limit."""
    project = Project.from_package("support.shop")
    ratios: dict[int, float] = {}
    print(f"{'nodes':>6} {'by hand ms':>11} {'by recipe ms':>13} {'ratio':>6} {'us/node':>8}")
    for nodes in (10, 100, 1000, 10000):
        text = recipe_text(nodes)
        by_turns = by_turns_ms(lambda n=nodes: by_hand(n), lambda t=text: by_recipe(project, t))  # type: ignore[misc]
        hand, recipe = by_turns
        ratios[nodes] = recipe / hand
        print(
            f"{nodes:>6} {hand:>11.2f} {recipe:>13.2f} {recipe / hand:>6.1f} {1e3 * recipe / nodes:>8.1f}", flush=True
        )
    if slow := [nodes for nodes, limit in LIMITS.items() if ratios[nodes] > limit]:
        raise SystemExit(f"{slow[0]} nodes take more than {LIMITS[slow[0]]} times as long as by hand")
