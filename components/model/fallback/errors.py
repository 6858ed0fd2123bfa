"""The error of a model that fails the self-check."""


class SelfCheckError(Exception):
    """Failed self-check: the name of the check, and the reason."""

    def __init__(self, check: str, reason: str) -> None:
        super().__init__(f"{check}: {reason}")
        self.check = check
        self.reason = reason
