"""A library, not a component."""

TABLE = {"GET": "answer"}
