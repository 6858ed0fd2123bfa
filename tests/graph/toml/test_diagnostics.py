"""Faults of TOML as a person sees them."""

import pytest
import tomli

from drawloom.graph.toml.diagnostics import explain_fault

BELOW = "TOML writes key = value, below a [table]"
CYRILLIC = "'\\u0430' is CYRILLIC SMALL LETTER A; such letters need quotes around them"


@pytest.mark.parametrize(
    ("text", "at", "reason", "hint"),
    [
        ("a = True", "True", "True is no value of TOML", "write true"),
        ("a = [1, None]", "None", "None is no value of TOML", "leave the key out: TOML has no such value"),
        ("a = 1\nb = 2\na = 3", "a = 3", "'a' is set twice", "it is set on line 1 already"),
        ("[n]\nq.r = 1\n[m]\n[n.q]", "[n.q]", "'q' is set twice", "it is set on line 2 already"),
        ("[a]\nb = 1\n[c]\n[a]  # again", "[a]  #", "'a' is set twice", "it is set on line 1 already"),
        ("[[a]]\nb = 0\n[[a]]\nb = 1\nb = 2", "b = 2", "'b' is set twice", "it is set on line 4 already"),
        ("a = ['x\n]", "'x", "a string that does not end", "close it with the quotes that open it"),
        ("b = 'ok'\na = \"x", '"x', "a string that does not end", "close it with the quotes that open it"),
        (
            'b = "ok"\na = """\nx = 1\n[y]\n',
            '"""',
            "a string that does not end",
            "close it with the quotes that open it",
        ),
        (
            '{"a": 1}',
            "{",
            "this is not TOML: Invalid statement",
            f"this looks like JSON; {BELOW}",
        ),
        ("\u0430 = 1", "\u0430", "this is not TOML: Invalid statement", CYRILLIC),
        ("a: 1", ": 1", "this is not TOML: Expected '=' after a key in a key/value pair", BELOW),
    ],
)
def test_a_fault_is_told_where_it_began(text: str, at: str, reason: str, hint: str) -> None:
    """The place is that of the second key, of the quotes that open, or of the word; the hint says what to do."""
    with pytest.raises(tomli.TOMLDecodeError) as caught:
        tomli.loads(text)
    assert explain_fault(text, caught.value) == (reason, text.rindex(at), hint)
