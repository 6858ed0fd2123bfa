"""Problems: did-you-mean hints, and the codes, which docs/problems.md explains."""

import re
from pathlib import Path

from drawloom.graph.problems import did_you_mean
from support.golden import read_faulty


def test_the_hint_names_the_nearest_or_a_few_choices() -> None:
    """A hint names the nearest choice, or lists the choices if there are few."""
    known = ["max_norm", "every", "Keep"]
    assert did_you_mean("kep", known) == "did you mean 'Keep'?"
    assert did_you_mean("adamw", ["optim.adam", "optim.adamw", "adapt"]) == "did you mean 'optim.adamw'?"
    assert did_you_mean("zzz", known) == "available: Keep, every, max_norm"
    assert did_you_mean("zzz", map(str, range(13))) == ""
    assert did_you_mean("zzz", []) == ""


ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^### (DL\d{3}): (.+)\n\n(.+\.)\n\n\*(.+\.)\*$", re.MULTILINE)
PAGE = (ROOT / "docs" / "problems.md").read_text("utf-8")
CODES = [code for code, *_ in SECTION.findall(PAGE)]


def read_printed() -> str:
    """Return the output of `check` for all faulty golden recipes."""
    return "".join(block.output for block in read_faulty().values())


def test_docs_explain_every_code_in_the_source() -> None:
    """docs/problems.md has one section per code of the source, in order, and no others."""
    sources = [path.read_text("utf-8") for path in (ROOT / "graph").rglob("*.py")]
    used = {code for source in sources for code in re.findall(r'"(DL\d{3})"', source)}
    assert sorted(used) == CODES


def test_docs_give_cause_and_remedy_of_every_code() -> None:
    """Every section has a title, a paragraph on the cause, and a paragraph in italics on the remedy."""
    assert re.findall(r"^### (DL\d{3})", PAGE, re.MULTILINE) == CODES


def test_every_code_has_a_golden_recipe() -> None:
    """Every code is printed for a golden recipe, except two that need Python values or two packages."""
    assert sorted({*re.findall(r"\((DL\d{3})\)$", read_printed(), re.MULTILINE), "DL120", "DL207"}) == CODES


def test_docs_mark_the_codes_that_are_warnings() -> None:
    """A code is always a warning or never, and its section's title says so."""
    warned = set(re.findall(r"^[^ ]+ warning: .*\((DL\d{3})\)$", read_printed(), re.MULTILINE))
    assert warned == {code for code, title, *_ in SECTION.findall(PAGE) if title.endswith(" (a warning)")}
