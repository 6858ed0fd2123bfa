"""A page with links to other pages."""

from collections.abc import Mapping

import attrs

from drawloom.graph import component, setting
from support.shop.ports import Filter, Page, Store


@attrs.frozen
class Entry:
    """One line of a menu."""

    page: str = setting("a node that is a page")
    text: str = setting("text of the entry", default="")


@component
class Menu:
    """Lists other pages."""

    links: Mapping[str, Page]
    filters: list[Filter] = attrs.field(factory=list)
    backup: Store | Page | None = None
    first: str | None = setting("the page that is shown first", default=None)
    entries: list[Entry] = setting("entries of the menu", factory=list)
    show: list[str] = setting("shown parts of a request", factory=list)
    hide: list[str] = setting("titles that are not listed", factory=list)
    hue: list[str] = setting("colours, of which nobody knows", factory=list)

    def answer(self, request: str) -> str:
        return ", ".join(self.links)
