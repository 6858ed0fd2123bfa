"""Reward for JSON of a schema."""

import pytest

from drawloom.components.rewards.json_schema import JsonSchema
from support.rewards import answer


def test_only_json_without_more_text_is_right() -> None:
    """Text around JSON, NaN, nesting beyond the parser's depth, and values of other types or formats are wrong."""
    day = {"type": "string", "format": "date"}
    reward = JsonSchema(json_schema={"$defs": {"day": day}, "anyOf": [{"type": "array"}, {"$ref": "#/$defs/day"}]})
    texts = ('"2024-02-29"', " [1]\n", "x [1]", "[1", "NaN", "[" * 100_000, '{"a": 1}', '"2023-02-29"')
    assert reward.scores([answer(text) for text in texts]) == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"items": {"minItem": 1}}, "items: Additional properties are not allowed ('minItem' was unexpected)"),
        ({"$defs": {"a": {"type": "text"}}}, "$defs.a.type: 'text' is not valid under any of the given schemas"),
    ],
)
def test_a_schema_with_misspelt_words_is_refused(schema: dict[str, object], words: str) -> None:
    """The message names their position in the schema."""
    with pytest.raises(ValueError, match="json_schema") as caught:
        JsonSchema(json_schema=schema)
    assert words in str(caught.value)
