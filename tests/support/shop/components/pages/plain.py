"""An ordinary page."""

import attrs

from drawloom.graph import Ordered, component, setting
from support.shop.ports import Filter, Page, Store


@component
class Plain:
    """Page with the content of a store."""

    store: Store
    fallback: Page | None = None
    filters: Ordered[Filter] = attrs.field(factory=Ordered)
    title: str = setting("title of the page")
    count: int = attrs.field(init=False, default=0)

    def answer(self, request: str) -> str:
        self.count += 1
        return f"{self.title}: {self.store.get(request)}"
