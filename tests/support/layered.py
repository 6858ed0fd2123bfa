"""A recipe of any number of nodes: a store, pages that fall back on pages of the layer below, and what serves them."""

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
    """The recipe of so many nodes."""
    pages = range(nodes - 2)
    lines = ['[store]\nuse = "stores.memory"\nsize = 100\nname = "all"\n']
    for number in pages:
        below = f'fallback = "@page{number - WIDTH}"\n' if number >= WIDTH else ""
        lines.append(f'[page{number}]\nuse = "pages.plain"\ntitle = "page {number}"\nstore = "@store"\n{below}')
    members = ", ".join(f'"@page{number}"' for number in pages)
    lines.append(f'[trainer]\nuse = "servers.loop"\nstore = "@store"\npages = [{members}]\n')
    return "\n".join(lines)


def by_recipe(project: Project, text: str) -> int:
    """Read, check and build; how many objects there are."""
    container = project.container(project.graph(MergedRecipe.of(parse(text))))
    container.build()
    return len(container)


def by_hand(nodes: int) -> Loop:
    """The same objects, as one would write it without a recipe."""
    store = Memory(size=100, name="all")
    pages: list[Plain] = []
    for number in range(nodes - 2):
        fallback = pages[number - WIDTH] if number >= WIDTH else None
        pages.append(Plain(title=f"page {number}", store=store, fallback=fallback))
    return serving(store, pages)


def serving(store: Any, pages: list[Any]) -> Loop:
    """What serves pages, with nothing for what the container fills in."""
    nothing: Any = None
    return Loop(store=store, pages=pages, counted=nothing, recipe=nothing)
