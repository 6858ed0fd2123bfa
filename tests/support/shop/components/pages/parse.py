"""The first filter."""

from drawloom.graph import component


@component(writes=("words",))
class Parse:
    """Strips a request."""

    def apply(self, request: str) -> str:
        return request.strip()
