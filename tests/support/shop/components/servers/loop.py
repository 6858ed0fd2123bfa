"""A server."""

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from drawloom.graph import Every, Problem, ResolvedRecipe, component, setting
from support.shop.ports import Counted, Page, Store


@component
class Loop:
    """Serves pages."""

    pages: list[Page]
    store: Store
    named: Mapping[str, Page] = attrs.field(factory=dict)
    counted: Every[Counted]
    recipe: ResolvedRecipe
    workers: int = setting("how many at once", default=1, impact="safe")
    served: list[str] = attrs.field(init=False, factory=list)

    def run(self) -> None:
        self.store.put("home", "welcome")
        self.served = [page.answer("home") for page in self.pages]

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Report more workers than values in the store."""
        store = node.neighbour("store")
        if "size" in store.settings and node.settings["workers"] > store.settings["size"]:
            text = f"{node.settings['workers']} workers can't share {store.settings['size']} values"
            yield node.problem("workers", text, f"write at most {store.settings['size']}")
