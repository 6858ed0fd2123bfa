"""The table of problems."""

import re
from pathlib import Path

from drawloom.graph.codes import CODES, GROUPS, page
from support.golden import FAULTY

ROOT = Path(__file__).parents[2]
KNOWN = [code.code for code in CODES]
CODE = re.compile(r'"(DL\d{3})"')


def test_every_code_stands_in_the_table_once_and_in_order() -> None:
    """Codes in the source are those of the table."""
    sources = (path for path in (ROOT / "graph").rglob("*.py") if path.name != "codes.py")
    used = {code for path in sources for code in CODE.findall(path.read_text("utf-8"))}
    assert sorted(used) == KNOWN == sorted(set(KNOWN))


def test_every_code_is_in_a_group_and_has_cause_and_remedy_in_sentences() -> None:
    """What a person looks up is told in full."""
    for code in CODES:
        assert code.code[2] in GROUPS
        assert code.cause.endswith(".") and code.remedy.endswith(".") and not code.title.endswith(".")


def test_the_page_is_what_the_table_says() -> None:
    """`python tests/golden` writes it anew."""
    assert (ROOT / "docs" / "problems.md").read_text("utf-8") == page()


def test_every_code_has_a_golden_recipe() -> None:
    """Each kind of problem is met by some recipe, but for the one that takes two installed packages."""
    texts = "".join(path.read_text("utf-8") for path in FAULTY.glob("*.txt"))
    assert sorted({*re.findall(r"\((DL\d{3})\)$", texts, re.MULTILINE), "DL207"}) == KNOWN


def test_warnings_of_the_table_are_the_warnings_that_are_printed() -> None:
    """A code is a warning always or never."""
    texts = "".join(path.read_text("utf-8") for path in FAULTY.glob("*.txt"))
    warned = set(re.findall(r"^[^ ]+ warning: .*\((DL\d{3})\)$", texts, re.MULTILINE))
    assert warned == {code.code for code in CODES if code.warning}
