"""The known name nearest to a misspelt one."""

import difflib
from collections.abc import Iterable

MAX_FUZZY_CANDIDATES, MAX_CANDIDATES = 120, 1000
"""With MAX_FUZZY_CANDIDATES known names only names one edit away are suggested, with MAX_CANDIDATES none: difflib takes
quadratic time, and thousands of problems must be reported within seconds."""

MAX_COMPARED_LETTERS = 60
"""Letters of a name that are compared."""

MAX_SHORT_NAME = 3
"""Letters of a short name, which another letter makes a different name."""

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_-."


def find_nearest(name: str, known: Iterable[str]) -> str | None:
    """
    Return the known name most similar to `name`, ignoring case, or None if none is similar.

    A single word is also compared with the last words of dotted names: `optim.adamw` is near to `AdamW`. For short
    words a replaced letter makes another word: `cpu` is near to `cup`, but not to `gpu`.
    """
    known = list(known)
    if len(known) >= MAX_CANDIDATES:
        return None
    name = name.casefold()[:MAX_COMPARED_LETTERS]
    if ends := sorted(candidate for candidate in known if candidate.casefold().endswith(f".{name}")):
        return ends[0]
    # Sorted, so that every machine suggests the same among equally similar names.
    folded = {candidate.casefold(): candidate for candidate in sorted(known)}
    if name in folded:
        return folded[name]
    if len(name) <= MAX_SHORT_NAME:
        folded = {
            candidate: known
            for candidate, known in folded.items()
            if len(candidate) != len(name) or sorted(candidate) == sorted(name)
        }
    near = (
        difflib.get_close_matches(name, folded, n=1, cutoff=0.6)
        if len(folded) < MAX_FUZZY_CANDIDATES
        else _find_one_edit_away(name, folded)
    )
    return folded[near[0]] if near else None


def _find_one_edit_away(name: str, known: Iterable[str]) -> list[str]:
    """Return the known names with one letter inserted, deleted, replaced or swapped."""
    cuts = [(name[:index], name[index:]) for index in range(len(name) + 1)]
    near = {name, *(head + tail[1:] for head, tail in cuts)}
    near |= {head + tail[1] + tail[0] + tail[2:] for head, tail in cuts if len(tail) > 1}
    # With skipped = 1 the letter replaces another one, with 0 it is inserted.
    near |= {head + letter + tail[skipped:] for head, tail in cuts for letter in LETTERS for skipped in (0, 1)}
    return sorted(near.intersection(known))
