"""A filter in some shops."""

from drawloom.graph import component


@component(writes=("user",))
class LogIn:
    """Finds out who asks."""

    def apply(self, request: str) -> str:
        return request
