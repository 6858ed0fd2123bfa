"""A store that needs a package that is never installed."""

from typing import Any

from drawloom.graph import component


@component(needs={"clouds_of_tomorrow": "shop[clouds]"})
class Cloud:
    """Keeps values elsewhere."""

    def get(self, key: str) -> Any:
        raise KeyError(key)

    def put(self, key: str, value: Any) -> None: ...
