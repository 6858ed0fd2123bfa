"""No component, but a library."""

TABLE = {"GET": "answer"}
