"""A server for all pages."""

from drawloom.graph import component, wired
from support.shop.ports import Page


@component(replaced_keys={"page": "a table for every page, which is found by type"})
class Catalog:
    """Serves all pages in a recipe."""

    pages: list[Page] = wired(factory=list)
