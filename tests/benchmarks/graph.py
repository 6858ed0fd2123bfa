"""What wiring costs: 10 to 10000 nodes read, checked and built, beside the same objects made by hand. CPU time."""

from drawloom.graph.project import Project
from support.cpu_time import by_turns_ms
from support.layered import by_hand, by_recipe, recipe_text

LIMITS = {1000: 15, 10000: 20}
"""By the number of nodes: the most time that a recipe may take, in times of the same objects made by hand."""


def main() -> None:
    """Print a row for each number of nodes; an error if some take longer than they may."""
    project = Project.of("support.shop")
    found: dict[int, float] = {}
    print(f"{'nodes':>6} {'by hand ms':>11} {'by recipe ms':>13} {'ratio':>6} {'us/node':>8}")
    for nodes in (10, 100, 1000, 10000):
        text = recipe_text(nodes)
        by_turns = by_turns_ms(lambda n=nodes: by_hand(n), lambda t=text: by_recipe(project, t))  # type: ignore[misc]
        hand, recipe = by_turns
        found[nodes] = recipe / hand
        print(
            f"{nodes:>6} {hand:>11.2f} {recipe:>13.2f} {recipe / hand:>6.1f} {1e3 * recipe / nodes:>8.1f}", flush=True
        )
    if slow := [nodes for nodes, most in LIMITS.items() if found[nodes] > most]:
        raise SystemExit(f"{slow[0]} nodes take more than {LIMITS[slow[0]]} times as long as by hand")
