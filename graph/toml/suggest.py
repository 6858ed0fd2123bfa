"""Did you mean ...?"""

import difflib
from collections.abc import Iterable

MANY, TOO_MANY = 120, 1000
"""From the first number of names on only those are near that one edit makes, from the second on none: a recipe with
thousands of faults must not take minutes to say so."""

LONGEST = 60
"""Letters of a name that are compared."""

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_-."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that names what is nearest to `name`, or else all there is to choose from."""
    known = list(known)
    near = nearest(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    if known and len(known) <= 12:
        return "there is " + ", ".join(sorted(known))
    return ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """What `name` was probably meant to be, whatever its case; None when nothing is near."""
    known = list(known)
    name = name.casefold()[:LONGEST]
    folded = {candidate.casefold(): candidate for candidate in sorted(known)} if len(known) < TOO_MANY else {}
    near = difflib.get_close_matches(name, folded, n=1, cutoff=0.6) if len(folded) < MANY else _one_edit(name, folded)
    return folded[near[0]] if near else None


def _one_edit(name: str, known: Iterable[str]) -> list[str]:
    """The known names that one letter more, less, other or swapped makes of this one."""
    cuts = [(name[:at], name[at:]) for at in range(len(name) + 1)]
    near = {name, *(head + tail[1:] for head, tail in cuts)}
    near |= {head + tail[1] + tail[0] + tail[2:] for head, tail in cuts if len(tail) > 1}
    near |= {head + letter + tail[skipped:] for head, tail in cuts for letter in LETTERS for skipped in (0, 1)}
    return sorted(near.intersection(known))
