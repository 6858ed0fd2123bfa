"""A page with links to other pages."""

from collections.abc import Mapping

import attrs

from drawloom.graph import component, setting
from support.shop.ports import Filter, Page, Store


@attrs.frozen
class Entry:
    """One line of a menu."""

    page: str = setting(doc="a node that is a page")
    text: str = setting(default="", doc="text of the entry")


@component
class Menu:
    """Lists other pages."""

    links: Mapping[str, Page]
    filters: list[Filter] = attrs.field(factory=list)
    backup: Store | Page | None = None
    first: str | None = setting(default=None, doc="the page that is shown first")
    entries: list[Entry] = setting(factory=list, doc="entries of the menu")
    show: list[str] = setting(factory=list, doc="shown parts of a request")
    hide: list[str] = setting(factory=list, doc="titles that are not listed")
    hue: list[str] = setting(factory=list, doc="colours, of which nobody knows")

    def answer(self, request: str) -> str:
        return ", ".join(self.links)
