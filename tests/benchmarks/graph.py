"""What wiring costs: 10 to 10000 nodes read, checked and built, beside the same objects made by hand. CPU time."""

from drawloom.graph.project import Project
from support.cpu_time import by_turns_ms
from support.layered import by_hand, by_recipe, recipe_text

LIMIT_MS = 60
"""For 1000 nodes."""


def main() -> None:
    """Print a row for each number of nodes; an error if 1000 take longer than they may."""
    project = Project.of("support.shop")
    found: dict[int, float] = {}
    print(f"{'nodes':>6} {'by hand ms':>11} {'by recipe ms':>13} {'ratio':>6} {'us/node':>8}")
    for nodes in (10, 100, 1000, 10000):
        text = recipe_text(nodes)
        hand, recipe = by_turns_ms(lambda n=nodes: by_hand(n), lambda t=text: by_recipe(project, t))  # type: ignore[misc]
        found[nodes] = recipe
        print(
            f"{nodes:>6} {hand:>11.2f} {recipe:>13.2f} {recipe / hand:>6.0f} {1e3 * recipe / nodes:>8.1f}", flush=True
        )
    if found[1000] > LIMIT_MS:
        raise SystemExit(f"1000 nodes take more than {LIMIT_MS} ms")
