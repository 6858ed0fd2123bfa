"""Reward for a number."""

from fractions import Fraction

import pytest

from drawloom.components.rewards.math_equal import MathEqual, extract_last_number
from drawloom.graph import UserError
from support.rewards import answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 1 + 1 is 2.", Fraction(2)),
        (r"\boxed{1} or rather \boxed{\frac{3}{4}}, not 5", Fraction(3, 4)),
        (r"\boxed{\text{about } 7}", Fraction(7)),
        (r"\boxed{", None),
        (r"\boxed{x = 7^\circ}", Fraction(7)),
        (r"\boxed{\$1,234\text{ or so}}", Fraction(1234)),
        (r"\boxed{\approx 7\,\mathrm{km}}", Fraction(7)),
        (r"\boxed{7^{\circ}}", Fraction(7)),
        (r"\boxed{2\sqrt{3}}", None),
        (r"\boxed{3\alpha}", None),
        (r"\boxed{x^3}", None),
        (r"\boxed{\frac{\pi}{3}}", None),
        (r"\boxed{5, 3}", None),
        ("#### 1,234.50", Fraction(2469, 2)),
        ("1,2", Fraction(2)),
        ("- 3 / 6", Fraction(-1, 2)),
        (r"-\dfrac{3}{6}", Fraction(-1, 2)),
        ("2e-3", Fraction(1, 500)),
        ("1/0", None),
        ("none, x2", None),
        ("", None),
        ("9" * 500, None),
    ],
)
def test_a_number_is_the_last_one_or_the_last_box(text: str, number: Fraction | None) -> None:
    """A closed box counts before all other numbers; text without a number, or with an open box, has none."""
    assert extract_last_number(text) == number


def test_equal_numbers_are_right_however_they_are_written() -> None:
    """Numbers are compared exactly, or within a relative tolerance; no number is wrong, also where 0 is expected."""
    texts = ("0.5", r"\boxed{\frac{1}{2}}", "1/2", "0.5001", "")
    assert MathEqual().scores([answer(text, answer="1/2") for text in texts]) == [1, 1, 1, 0, 0]
    assert MathEqual(tolerance=1e-3).scores([answer(text, answer=0.5) for text in texts]) == [1, 1, 1, 1, 0]
    assert MathEqual().scores([answer("", answer=0), answer("0", answer="#### 0")]) == [0, 1]
    with pytest.raises(UserError, match=r"a\.jsonl:3: answer is 'x', which is not a number"):
        MathEqual().scores([answer("1", answer="x")])


def test_an_expected_expression_is_refused() -> None:
    """A part of it would reward wrong completions; a solution with its number after #### is read."""
    for text in (r"2\sqrt{3}", r"so it is \boxed{x^3}", r"\frac{\pi}{4}", True):
        with pytest.raises(UserError, match="which is not a number"):
            MathEqual().check_example(answer("3", answer=text).example)
    assert MathEqual().scores([answer("72", answer="48/2 = 24, 48+24 = 72\n#### 72")]) == [1]
