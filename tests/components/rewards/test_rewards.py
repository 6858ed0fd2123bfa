"""Rewards, without a model."""

import os
import re
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from drawloom.components.ports.rollouts import Answer
from drawloom.components.rewards.code import Code
from drawloom.components.rewards.exact_match import ExactMatch
from drawloom.components.rewards.json_schema import JsonSchema, is_valid
from drawloom.components.rewards.length import Length
from drawloom.components.rewards.math_equal import MathEqual, read_number
from drawloom.components.rewards.regex import Regex
from drawloom.graph import UserError


def answer(text: str, tokens: int = 4, is_ended: bool = True, **example: Any) -> Answer:
    return Answer(text, tokens, is_ended, {"source": "a.jsonl:3", **example})


def test_exact_match_ignores_white_space_around_and_needs_the_end() -> None:
    """Only the expected text, ended by the model itself, is right; an empty answer to a text is wrong."""
    answers = [answer(text, answer="01 2") for text in ("01 2", " 01 2\n", "012", "01 2 3", "")]
    assert ExactMatch().scores([*answers, answer("01 2", is_ended=False, answer="01 2")]) == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("example", "message"),
    [({}, "a.jsonl:3 has the keys source, and not 'answer'"), ({"answer": 3}, "a.jsonl:3: answer is 3; write a text")],
)
def test_an_example_without_the_expected_text_is_named(example: dict[str, Any], message: str) -> None:
    """A reward that has nothing to compare with ends with the line of the example."""
    with pytest.raises(UserError, match=re.escape(message)):
        ExactMatch().scores([answer("x", **example)])


def test_a_regular_expression_is_searched_in_all_lines() -> None:
    """Anchors bind a pattern to the whole completion, and a dot is also a line end."""
    pattern = r"\A<think>.*</think>\s*\S+\Z"
    texts = ("<think>a\nb</think> 3", "<think>a\nb 3", "x <think></think> 3")
    assert Regex(pattern=pattern).scores([answer(text) for text in texts]) == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 1 + 1 is 2.", Fraction(2)),
        (r"\boxed{1} or rather \boxed{\frac{3}{4}}, not 5", Fraction(3, 4)),
        (r"\boxed{\text{about } 7}", Fraction(7)),
        (r"\boxed{", None),
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
    assert read_number(text) == number


def test_equal_numbers_are_right_however_they_are_written() -> None:
    """Numbers are compared exactly, or within a relative tolerance; no number is wrong, also where 0 is expected."""
    texts = ("0.5", r"\boxed{\frac{1}{2}}", "1/2", "0.5001", "")
    assert MathEqual().scores([answer(text, answer="1/2") for text in texts]) == [1, 1, 1, 0, 0]
    assert MathEqual(tolerance=1e-3).scores([answer(text, answer=0.5) for text in texts]) == [1, 1, 1, 1, 0]
    assert MathEqual().scores([answer("", answer=0), answer("0", answer="#### 0")]) == [0, 1]
    with pytest.raises(UserError, match="a.jsonl:3: answer is 'x', in which there is no number"):
        MathEqual().scores([answer("1", answer="x")])


def test_length_falls_over_the_buffer() -> None:
    """The penalty of DAPO: 0, then a line to -1, then -1."""
    reward = Length(max_tokens=10, buffer=4)
    assert reward.scores([answer("x", tokens) for tokens in (1, 6, 7, 9, 10, 99)]) == [0, 0, -0.25, -0.75, -1, -1]


SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"type": ["array", "null"], "items": {"enum": [1, "b", None, [True]]}, "minItems": 1, "maxItems": 2},
    {"anyOf": [{"type": "string", "pattern": "^b", "maxLength": 2}, {"type": "number", "minimum": 1, "maximum": 2}]},
    {"not": {"const": {"a": 1}}, "oneOf": [{"type": "object"}, {"required": ["a"]}]},
    {"allOf": [{"minLength": 1}, {"additionalProperties": {"type": "boolean"}}]},
    True,
    False,
]
VALUES: list[Any] = [
    {"a": 1}, {"a": 1.0}, {"a": 1.5}, {"a": True}, {"a": 1, "b": 2}, {}, [], [1], [1.0, True], [[True], None, 1], [[1]],
    None, "", "b", "bb", "bbb", "a", 1, 1.5, 3, True, {"b": False},
]  # fmt: skip


def test_schemas_are_those_of_jsonschema() -> None:
    """Every value is valid exactly where the package jsonschema finds it valid."""
    for schema in SCHEMAS:
        validator = jsonschema.Draft202012Validator(schema)
        for value in VALUES:
            assert is_valid(value, schema) == validator.is_valid(value), (schema, value)


def test_only_json_without_more_text_is_right() -> None:
    """Text around JSON, NaN and nesting beyond the parser's depth are wrong."""
    reward = JsonSchema(json_schema={"type": ["object", "array", "number"]})
    texts = ('{"a": 1}', ' [1]\n', 'x {"a": 1}', '{"a": 1', "NaN", "[" * 100_000, '"a"')
    assert reward.scores([answer(text) for text in texts]) == [1, 1, 0, 0, 0, 0, 0]


GOOD = "def double(x):\n    return 2 * x\n"
TESTS = "assert double(2) == 4\nassert double(-1) == -2"


def test_programs_pass_only_if_all_tests_have_run() -> None:
    """Right programs pass; wrong ones, and those that exit, print or raise before the tests, fail."""
    programs = {
        GOOD: 1,
        f"Sure:\n```python\nwrong\n```\nor\n```py\n{GOOD}```\nDone.": 1,
        "def double(x):\n    return x + 2\n": 0,
        f"{GOOD}import os\nos._exit(0)": 0,
        f"{GOOD}raise SystemExit(0)": 0,
        "print('passed')": 0,
        "not python": 0,
        "": 0,
    }
    assert Code(seconds=20.0).scores([answer(text, tests=TESTS) for text in programs]) == [*programs.values()]


def test_programs_are_stopped_at_their_limits(tmp_path: Path) -> None:
    """
    A loop, a sleeper with a child of its own, much memory, a large file and much output score 0; nothing is left over.
    """
    marker = tmp_path / "child"
    child = f"import os, time\nif os.fork() == 0:\n    open({str(marker)!r}, 'w').write(str(os.getpid()))\n"
    programs = [
        "while True: pass",
        f"{child}time.sleep(60)",
        "data = bytearray(10**10)",
        "open('large', 'wb').write(bytes(2**22))",
        "import sys\nwhile True: sys.stdout.write('x' * 10**6)",
    ]
    began = time.monotonic()
    assert Code(seconds=2.0, parallel=5).scores([answer(text, tests="pass") for text in programs]) == [0.0] * 5
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int(marker.read_text()), 0)
            time.sleep(0.1)
