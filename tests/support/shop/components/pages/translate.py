"""A filter in between."""

from drawloom.graph import component


@component(changes=("words",))
class Translate:
    """Puts other words in their place."""

    def apply(self, request: str) -> str:
        return request.lower()
