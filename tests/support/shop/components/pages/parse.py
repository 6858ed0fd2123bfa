"""The first filter."""

from drawloom.graph import component


@component(writes=("words",))
class Parse:
    """Cuts a request into words."""

    def apply(self, request: str) -> str:
        return request.strip()
