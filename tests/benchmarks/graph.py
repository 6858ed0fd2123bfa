"""What wiring costs: 10 to 1000 nodes read, checked and built, beside the same objects made by hand. CPU time."""

import gc
import statistics
import time
from collections.abc import Callable

import tomli

from drawloom.graph.recipe import Recipe
from drawloom.graph.workshop import Workshop
from support.shop.components.pages.plain import Plain
from support.shop.components.servers.loop import Loop
from support.shop.components.stores.memory import Memory

ROUNDS = 9
WIDTH = 10
"""Pages in a layer; each falls back on one of the layer below."""


def recipe_text(nodes: int) -> str:
    """A recipe with this many pages, each with an own store for every tenth."""
    lines = ['[store]\nuse = "stores.memory"\nsize = 100\nname = "all"\n']
    for number in range(nodes - 2):
        below = f'fallback = "@page{number - WIDTH}"\n' if number >= WIDTH else ""
        lines.append(f'[page{number}]\nuse = "pages.plain"\ntitle = "page {number}"\nstore = "@store"\n{below}')
    pages = ", ".join(f'"@page{number}"' for number in range(nodes - 2))
    lines.append(f'[trainer]\nuse = "servers.loop"\nstore = "@store"\npages = [{pages}]\n')
    return "\n".join(lines)


def by_recipe(workshop: Workshop, text: str) -> int:
    """Read, check and build; how many objects there are."""
    container = workshop.container(workshop.graph(Recipe.of(tomli.loads(text))))
    container.build()
    return len(container)


def by_hand(nodes: int) -> int:
    """The same objects, as one would write it without a recipe."""
    store = Memory(size=100, name="all")
    pages: list[Plain] = []
    for number in range(nodes - 2):
        fallback = pages[number - WIDTH] if number >= WIDTH else None
        pages.append(Plain(title=f"page {number}", store=store, fallback=fallback))
    Loop(store=store, pages=list(pages), counted={}, recipe=None)  # type: ignore[arg-type]
    return len(pages) + 2


def cpu_ms(function: Callable[[], int]) -> float:
    """The median CPU time of a few rounds, in milliseconds."""
    times = []
    for _ in range(ROUNDS):
        gc.collect()
        began = time.process_time()
        function()
        times.append(time.process_time() - began)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Print a row for each number of nodes."""
    workshop = Workshop.of("support.shop")
    print(f"{'nodes':>6} {'by hand ms':>11} {'by recipe ms':>13} {'ratio':>6}")
    for nodes in (10, 100, 1000):
        text = recipe_text(nodes)
        hand, recipe = cpu_ms(lambda n=nodes: by_hand(n)), cpu_ms(lambda t=text: by_recipe(workshop, t))  # type: ignore[misc]
        print(f"{nodes:>6} {hand:>11.2f} {recipe:>13.2f} {recipe / hand:>6.0f}")
