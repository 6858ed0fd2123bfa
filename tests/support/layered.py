"""A recipe with any number of nodes: a store, pages with fallbacks in the layer below, and their server."""

from typing import Any

from drawloom.graph.project import Project
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.toml.parsing import parse
from support.shop.components.pages.plain import Plain
from support.shop.components.servers.loop import Loop
from support.shop.components.stores.memory import Memory

WIDTH = 10
"""Pages in a layer."""


def recipe_text(nodes: int) -> str:
    """Return a recipe with this many nodes."""
    pages = range(nodes - 2)
    lines = ['[store]\nuse = "stores.memory"\nsize = 100\nname = "all"\n']
    for number in pages:
        below = f'fallback = "@page{number - WIDTH}"\n' if number >= WIDTH else ""
        lines.append(f'[page{number}]\nuse = "pages.plain"\ntitle = "page {number}"\nstore = "@store"\n{below}')
    members = ", ".join(f'"@page{number}"' for number in pages)
    lines.append(f'[trainer]\nuse = "servers.loop"\nstore = "@store"\npages = [{members}]\n')
    return "\n".join(lines)


def by_recipe(project: Project, text: str) -> int:
    """Read, check and build a recipe; return its object count."""
    container = project.container(project.graph(MergedRecipe.from_values(parse(text))))
    container.build()
    return len(container)


def by_hand(nodes: int) -> Loop:
    """Build the same objects without a recipe."""
    store = Memory(size=100, name="all")
    pages: list[Plain] = []
    for number in range(nodes - 2):
        fallback = pages[number - WIDTH] if number >= WIDTH else None
        pages.append(Plain(title=f"page {number}", store=store, fallback=fallback))
    return serve(store, pages)


def serve(store: Any, pages: list[Any]) -> Loop:
    """Return the server of pages; fields set only by the container are None."""
    nothing: Any = None
    return Loop(store=store, pages=pages, counted=nothing, recipe=nothing)
