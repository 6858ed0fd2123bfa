"""A page that leads to others."""

from collections.abc import Mapping

import attrs

from drawloom.graph import Names, component, setting
from support.shop.ports import Filter, Page, Store


@attrs.frozen
class Entry:
    """One line of a menu."""

    page: str = setting(names=Page, doc="a node that is a page")
    text: str = setting(default="", doc="what is shown")


@component
class Menu:
    """Lists other pages."""

    links: Mapping[str, Page]
    filters: list[Filter] = attrs.field(factory=list)
    backup: Store | Page | None = None
    first: str | None = setting(default=None, names=Page, doc="the page that is shown first")
    entries: list[Entry] = setting(factory=list, doc="what is listed")
    show: list[str] = setting(factory=list, names="value", doc="what of a request is shown")
    hide: list[str] = setting(factory=list, names=Names("title", patterns=True), doc="titles that are not listed")
    hue: list[str] = setting(factory=list, names="colour", doc="colours, of which nobody knows")

    def answer(self, request: str) -> str:
        return ", ".join(self.links)
