"""Which node an exception comes from, and where the setting that is its reason is written."""

import re
from collections.abc import Mapping
from typing import Any

from drawloom.graph.problems import Position
from drawloom.graph.recipe.layers import Leaf
from drawloom.graph.recipe.merged import VARIABLE
from drawloom.graph.wiring.node import Node

SETTING_IN_MESSAGE = re.compile(r"^(\w+): |`(\w+)`")
"""How messages name the setting that is wrong, or that would help: `paths: ...`, or in backticks."""


def find_raising_node(error: BaseException, objects: Mapping[str, Any], otherwise: str = "") -> str:
    """
    The node whose method is the innermost of the traceback: one node may be opened while another reads from it.

    `otherwise` if no method of these objects is in the traceback.
    """
    names = {id(item): name for name, item in objects.items()}
    found, trace = otherwise, error.__traceback__
    while trace is not None:
        # By identity: a local variable may be anything, also an object that compares equal to all others.
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def locate_setting(node: Node, message: str, variables: Mapping[str, Leaf]) -> Position | None:
    """
    Return the position of the setting that a message names, or of the variable that is its value.

    It is that of the node if the message names no setting that is written.

    None for a node of a shipped recipe: what is wrong is not written there.
    """
    keys = [key for pair in SETTING_IN_MESSAGE.findall(message) for key in pair if key in node.table.items]
    use = node.table.use
    if not keys and use is not None and use.layer.is_shipped:
        return None
    item = node.table.items[keys[0]] if keys else None
    value = str(item.value) if isinstance(item, Leaf) else ""
    if value.startswith(VARIABLE) and (variable := variables.get(value.removeprefix(VARIABLE))) is not None:
        return variable.position
    return node.position_of((keys[0],) if keys else ())
