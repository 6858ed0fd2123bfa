"""Names of settings and components in other frameworks, from `foreign_names.toml` beside the package."""

from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any

import tomli


@cache
def read_foreign_names() -> dict[str, dict[str, Any]]:
    """Return the file's tables."""
    text = (files(__name__.partition(".")[0]) / "foreign_names.toml").read_text("utf-8")
    return tomli.loads(text)


def fold_name(name: str) -> str:
    """Return a name's letters and digits in lower case: `CrossEntropy` and `cross_entropy` are one name."""
    return "".join(filter(str.isalnum, name.casefold()))


def find_own_component(name: str) -> str | None:
    """Return drawloom's component for another framework's name, whose case and signs do not count."""
    values = {fold_name(foreign): str(own) for foreign, own in read_foreign_names()["values"].items()}
    return values.get(fold_name(name))


def find_own_name(name: str, known: Collection[str]) -> str | None:
    """Return a hint with drawloom's name for another framework's name of a setting, or of a `known` component."""
    tables = read_foreign_names()
    if (value := find_own_component(name)) in known:
        return f"did you mean {value!r}?"
    others = ("values", "defaults", "recipes", "flavors", "choices")
    key_tables = [table for framework, table in tables.items() if framework not in others]
    own_keys = {foreign.rpartition(".")[2]: str(key) for table in key_tables for foreign, key in table.items()}
    target = own_keys.get(name, "").partition(" *")[0]  # "node.key * 100" without its factor
    return f"write {target}" if target and not target.startswith(("-", "extends")) else None
