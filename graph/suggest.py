"""Did you mean ...?"""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that names what is nearest to `name`, or else all there is to choose from."""
    known = sorted(known)
    near = nearest(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    if known and len(known) <= 12:
        return "there is " + ", ".join(known)
    return ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """What `name` was probably meant to be, whatever its case; None when nothing is near."""
    folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    near = difflib.get_close_matches(name.casefold(), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else None
