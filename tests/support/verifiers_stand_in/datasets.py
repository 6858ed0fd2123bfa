"""Stand-in for the package `datasets`: lists of rows."""

from typing import Any, Self

import numpy  # noqa: F401 - imported by the package, too, or every conversation's process would import it


class Dataset(list[dict[str, Any]]):
    """Rows with a number and a prompt."""

    @classmethod
    def from_list(cls, rows: list[dict[str, Any]]) -> Self:
        prompts = [row.get("prompt") or [{"role": "user", "content": row["question"]}] for row in rows]
        return cls({**row, "prompt": prompts[number], "example_id": number} for number, row in enumerate(rows))
