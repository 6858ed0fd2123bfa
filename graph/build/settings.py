"""Settings of a node: variables put in, escapes taken out, each value structured strictly and checked."""

from collections.abc import Mapping
from typing import Any

import attrs

from drawloom.graph.build.node import Draft, dotted
from drawloom.graph.problems import Place
from drawloom.graph.recipe.layers import Leaf, Path, Table
from drawloom.graph.recipe.variables import VARIABLE
from drawloom.graph.registry.spec import Field
from drawloom.graph.toml.suggest import did_you_mean
from drawloom.graph.types.structure import Fault, Values

INVALID = object()
"""What stands for a value that is at fault."""


@attrs.define(eq=False)
class SettingsResolver:
    """Settles nodes, with the variables of their recipe."""

    vars: dict[str, Leaf]
    values: Values = attrs.field(factory=Values)

    def settle(self, node: Draft) -> None:
        """Fill in a node's settings; what can't be becomes a problem of the node."""
        for key, item in node.table.items.items():
            field = node.spec.fields.get(key)
            if field is None or field.kind in ("every", "recipe"):
                if key != "use":
                    self._unknown(node, key, field)
            elif field.kind == "setting":
                self._set(node, field, item)
        for field in node.spec.fields.values():
            if field.kind == "setting" and field.name not in node.table.items:
                self._set_default(node, field)

    def _unknown(self, node: Draft, key: str, field: Field | None) -> None:
        if field is not None:
            text = f"{key!r} is filled in by the container and can't be set"
            return node.fault("DL301", text, "remove it", (key,), key=True)
        owner = node.table.discarded.get(key)
        known = [name for name, field in node.spec.fields.items() if field.kind not in ("every", "recipe")]
        hint = f"it belonged to {owner!r}, which this `use` replaces" if owner else did_you_mean(key, known)
        node.fault("DL302", f"{node.spec.use!r} has no setting or edge {key!a}", hint, (key,), key=True)

    def _set(self, node: Draft, field: Field, item: Leaf | Table) -> None:
        plain = self.plain(node, item, (field.name,))
        if plain is INVALID:
            return
        try:
            value, faults = self.values.structure(plain, field.type)
            if not faults and field.check and (reason := field.check(value)):
                faults = [Fault((), reason)]
        except Exception as error:  # of the component's own: its annotations, its checks
            return node.fails(f"the setting {field.name!r} can't be read", error)
        for fault in faults:
            path = (field.name, *fault.path)
            place = self._variable_place(item)
            written = f" ({item.value})" if place and isinstance(item, Leaf) else ""
            node.fault("DL303", f"{dotted(path)}{written}: {fault.text}", fault.hint, path, place=place)
        if not faults:
            node.settings[field.name] = value

    def _variable_place(self, item: Leaf | Table) -> Place | None:
        """Where a value stands that is a variable as a whole."""
        name = item.value if isinstance(item, Leaf) and isinstance(item.value, str) else ""
        found = self.vars.get(name.removeprefix(VARIABLE)) if name.startswith(VARIABLE) else None
        return found.place if found else None

    def _set_default(self, node: Draft, field: Field) -> None:
        if not field.required:
            node.settings[field.name] = field.default_value()
            return
        wanted = self.values.describe_type(field.type)
        text = f"{node.spec.use!r} needs the setting {field.name!r} ({wanted})"
        node.fault("DL305", text, f"write {field.name} = ...", ())

    def plain(self, node: Draft, item: Any, path: Path) -> Any:
        """A value as settings take it; REFUSED if a part of it is at fault."""
        if isinstance(item, Leaf):
            return self.plain(node, item.value, path)
        if isinstance(item, Table):
            return self.plain(node, item.items, path)
        if isinstance(item, str):
            return self._plain_string(node, item, path)
        if isinstance(item, list):
            parts = [self.plain(node, part, (*path, number)) for number, part in enumerate(item)]
            return INVALID if any(part is INVALID for part in parts) else parts
        if isinstance(item, Mapping):
            table = {key: self.plain(node, part, (*path, key)) for key, part in item.items()}
            return INVALID if any(part is INVALID for part in table.values()) else table
        return item

    def _plain_string(self, node: Draft, text: str, path: Path) -> Any:
        if text[:1] not in ("@", "$"):
            return text
        if text[:2] in ("@@", "$$"):
            return text[1:]
        if text.startswith(VARIABLE):
            return self.variable(node, text, path)
        if text.startswith("@"):
            why = f"{dotted(path)} is a setting, so it can't refer to a node with {text!r}"
        else:
            why = f"{text!r} is no variable: those are written $vars.name, and stand for a whole value"
        node.fault("DL306", why, f'write "{text[0]}{text}" if the text itself is meant', path)
        return INVALID

    def variable(self, node: Draft, text: str, path: Path) -> Any:
        leaf = self.vars.get(text.removeprefix(VARIABLE))
        if leaf is None:
            hint = did_you_mean(text.removeprefix(VARIABLE), self.vars) or "write it into [vars]"
            node.fault("DL307", f"there is no variable {text!r}", hint, path)
            return INVALID
        return leaf.value
