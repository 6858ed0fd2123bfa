r"""Reward for a number: the last \boxed{...} of a completion, or else its last number."""

import re
from collections.abc import Sequence
from fractions import Fraction

from drawloom import UserError, at_least, component, setting
from drawloom.components.rewards.expected import ExpectedValueReward
from drawloom.ports import Answer, Example

DECIMAL = r"\d+(?:\.\d+)?|\.\d+"
GROUPED = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?"
NUMBER = rf"[-+]?\s*(?:\\[dt]?frac\{{[-+]?\d+\}}\{{\d+\}}|(?:{GROUPED}|{DECIMAL})(?:[eE][-+]?\d{{1,3}}|\s*/\s*\d+)?)"
PARTS = re.compile(r"(?P<sign>[-+]?)\s*(?:\\[dt]?frac\{(?P<top>[-+]?\d+)\}\{(?P<bottom>\d+)\}|(?P<plain>.+))")
BOXED = r"\boxed{"
UNITS = r"(?:text\w*|math(?:rm|bf|it)|mbox|rm|q?quad|circ|degree|approx|left|right|displaystyle)\b|[%$!,; ]"
EXPRESSION = re.compile(rf"\d|\^(?!\{{?\\circ)|\\(?!{UNITS})")
"""What makes a number in LaTeX a part of an expression, beside units and spaces."""

MAX_DIGITS = 400
"""Longest text of a number: a longer one would take seconds to parse."""


@component
class MathEqual(ExpectedValueReward):
    r"""
    1 for a completion whose number equals the expected one, else 0.

    A completion's number is in its last \boxed{...}, or is the last number in the text. Numbers are integers, decimals,
    fractions (3/4, \frac{3}{4}), with an exponent, or with commas between thousands, and are compared as exact
    fractions, up to `tolerance`. The expected value is a number, or a text that is read the same way: "#### 72" is 72.
    A box or an expected value with another expression, such as 2\sqrt{3}, has no number.
    """

    tolerance: float = setting("largest relative difference of equal numbers", default=0.0, check=at_least(0))

    def check_example(self, example: Example) -> None:
        self._read_expected_number(example)

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        return [self._score(answer) for answer in answers]

    def _score(self, answer: Answer) -> float:
        """Return 1 for the expected number, up to `tolerance`; else 0."""
        expected, value = self._read_expected_number(answer.example), extract_last_number(answer.text)
        if value is None:
            return 0.0
        return float(abs(value - expected) <= Fraction(self.tolerance) * abs(expected))

    def _read_expected_number(self, example: Example) -> Fraction:
        """Return the expected number. Raises UserError if the example's value is no number."""
        super().check_example(example)
        value = example[self.key]
        text = "" if isinstance(value, bool) else str(value).rpartition("####")[2]
        is_latex = "\\" in text and BOXED not in text
        number = extract_last_number(f"{BOXED}{text}}}" if is_latex else text)
        if number is None:
            fault = f"{self.key} is {value!r}, which is not a number"
            source = example.get("source", "an example")
            raise UserError(f"{source}: {fault}; correct it, or leave the example out", 2)
        return number


def extract_last_number(text: str) -> Fraction | None:
    """Return a text's last number, or the last box's; None without one."""
    boxed = _find_last_box_content(text)
    numbers = [*re.finditer(rf"(?<![\w.]){NUMBER}", text if boxed is None else boxed)]
    if not numbers or (boxed is not None and EXPRESSION.search(boxed.replace(numbers[-1][0], "", 1))):
        return None
    return _parse_exact_number(numbers[-1][0])


def _find_last_box_content(text: str) -> str | None:
    """Return the last box's content, with balanced braces; empty if the box is not closed, None without a box."""
    begin = text.rfind(BOXED)
    if begin < 0:
        return None
    depth, first = 1, begin + len(BOXED)
    for index in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[first:index]
    return ""


def _parse_exact_number(text: str) -> Fraction | None:
    """Return a number's exact value; None if it is too long, or divides by zero."""
    match = PARTS.fullmatch(text)
    if match is None or len(text) > MAX_DIGITS:
        return None
    try:
        if match["plain"]:
            value = Fraction(re.sub(r"[\s,]", "", match["plain"]))
        else:
            value = Fraction(int(match["top"]), int(match["bottom"]))
    except ZeroDivisionError:
        return None
    return -value if match["sign"] == "-" else value
