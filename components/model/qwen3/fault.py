"""What is wrong with a setting."""

import attrs


@attrs.frozen
class Fault:
    """Why a setting, or a part of it, can't be what it is, and what to write instead."""

    key: str | tuple[str, ...]
    why: str
    instead: str
