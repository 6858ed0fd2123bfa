"""A filter without named values."""

from drawloom.graph import component


@component
class Shorten:
    """Cuts a request off."""

    def apply(self, request: str) -> str:
        return request[:100]
