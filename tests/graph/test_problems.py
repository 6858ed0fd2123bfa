"""Problems: did-you-mean suggestions, and the codes, which docs/problems.md explains."""

import re
import time
from pathlib import Path

import pytest

from drawloom.graph.problems import did_you_mean, find_nearest
from support.golden import read_faulty

KNOWN = ["max_norm", "every", "Keep"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_nrom", "max_norm"),
        ("max-norm", "max_norm"),
        ("EVERY", "every"),
        ("keep", "Keep"),
        ("zzz", None),
        ("", None),
    ],
)
def test_the_nearest_name_is_found_whatever_its_case(name: str, nearest: str | None) -> None:
    """Typing errors are near a name, and another word is not."""
    assert find_nearest(name, KNOWN) == nearest


def test_short_names_with_another_letter_are_not_near() -> None:
    """Short names are near if letters are swapped or missing, not if a letter is replaced."""
    assert [find_nearest(name, ["cpu", "cuda", "auto"]) for name in ("gpu", "cup", "cp", "CPU")] == [
        None,
        "cpu",
        "cpu",
        "cpu",
    ]


def test_the_hint_names_the_nearest_or_a_few_choices() -> None:
    """A hint names the nearest choice, or lists the choices if there are few."""
    assert did_you_mean("kep", KNOWN) == "did you mean 'Keep'?"
    assert did_you_mean("adamw", ["optim.adam", "optim.adamw", "adapt"]) == "did you mean 'optim.adamw'?"
    assert did_you_mean("zzz", KNOWN) == "available: Keep, every, max_norm"
    assert did_you_mean("zzz", map(str, range(13))) == ""
    assert did_you_mean("zzz", []) == ""


def test_the_same_name_in_another_case_is_nearest_of_many() -> None:
    """A name in another case is nearer than a name that lacks a letter and sorts first."""
    assert find_nearest("Node77", ["node7", "node77", *(f"other{number}" for number in range(200))]) == "node77"


@pytest.mark.parametrize("name", ["node7", "nod77", "ndoe77", "node777", "node77", "NODE77"])
def test_one_edit_is_found_among_many(name: str) -> None:
    """A typing error in one letter is recognized among hundreds of names."""
    assert find_nearest(name, [f"other{number}" for number in range(500)] + ["node77"]) == "node77"


def test_suggestions_for_thousands_of_names_are_fast() -> None:
    """A thousand hints among five thousand names take less than a second of processor time."""
    names = [f"node{number}" for number in range(5000)]
    began = time.process_time()
    assert [find_nearest(f"nobody{number}", names) for number in range(1000)] == [None] * 1000
    assert time.process_time() - began < 1


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
