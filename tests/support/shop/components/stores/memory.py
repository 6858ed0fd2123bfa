"""A store in memory."""

from typing import Any

import attrs

from drawloom.graph import at_least, component, setting


@component
class Memory:
    """Keeps values in memory."""

    size: int = setting(default=10, check=at_least(1), doc="how many values it keeps", impact="safe")
    name: str = setting(default="memory", doc="name of the store")
    values: dict[str, Any] = attrs.field(init=False, factory=dict)

    def get(self, key: str) -> Any:
        return self.values[key]

    def put(self, key: str, value: Any) -> None:
        self.values[key] = value
