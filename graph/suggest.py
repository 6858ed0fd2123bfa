"""Did you mean ...?"""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that names what is nearest to `name`, or else all there is to choose from."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if known and len(known) <= 12:
        return "there is " + ", ".join(known)
    return ""
