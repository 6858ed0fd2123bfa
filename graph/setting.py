"""What a field of a component that a recipe sets says of itself."""

from collections.abc import Callable
from typing import Any, Literal

import attrs

Change = Literal["free", "semantic", "structural"]
Check = Callable[[Any], str | None]


@attrs.frozen
class Names:
    """
    What the text of a setting names: something of a kind that nodes offer, or a node that fits a port.

    `patterns` may hold the shell's wildcards, and name whatever they match, at least one thing.
    """

    kind: str | type
    patterns: bool = False


def setting(
    *,
    default: Any = attrs.NOTHING,
    factory: Callable[[], Any] | None = None,
    change: Change | None = None,
    check: Check | None = None,
    names: str | type | Names | None = None,
    doc: str = "",
    alias: str | None = None,
) -> Any:
    """
    A field that a recipe sets.

    `change` says what it means to resume with another value: free (nothing that is learned depends on it), semantic
    (the run goes on, but is another run), structural (the saved state no longer fits); the component's own if left
    out. `check` takes the value and says why it can't be, or None. `names` says that each text in the value names
    something, which `check` looks for: a node that fits this port, or a "value" of a sequence, or whatever else some
    component offers (see `component`). `alias` is the name in recipes and in the constructor, where the component
    offers a method or property of that name itself.
    """
    validator = None if check is None else _as_validator(check)
    default = attrs.Factory(factory) if factory is not None else default
    named = names if names is None or isinstance(names, Names) else Names(names)
    meta = {"change": change, "check": check, "doc": doc, "names": named}
    return attrs.field(default=default, validator=validator, metadata=meta, alias=alias)


def _as_validator(check: Check) -> Callable[[Any, Any, Any], None]:
    def validate(_owner: Any, field: Any, value: Any) -> None:
        if reason := check(value):
            raise ValueError(f"{field.alias}: {reason}")

    return validate
