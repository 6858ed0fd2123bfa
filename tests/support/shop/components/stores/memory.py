"""A store in memory."""

from typing import Any

import attrs

from drawloom.graph import at_least, component, setting


@component
class Memory:
    """Keeps values in memory."""

    size: int = setting("how many values it keeps", default=10, check=at_least(1), impact="safe")
    name: str = setting("name of the store", default="memory")
    values: dict[str, Any] = attrs.field(init=False, factory=dict)

    def get(self, key: str) -> Any:
        return self.values[key]

    def put(self, key: str, value: Any) -> None:
        self.values[key] = value
