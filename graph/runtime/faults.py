"""The node behind an exception, and the position of the setting named in its message."""

import re
from collections.abc import Mapping
from typing import Any

from drawloom.graph.problems import Position
from drawloom.graph.recipe.layers import Leaf
from drawloom.graph.recipe.merged import VARIABLE
from drawloom.graph.wiring.node import Node

SETTING_IN_MESSAGE = re.compile(r"^(\w+): |`(\w+)`")
"""Pattern of settings in messages: `paths: ...` names the wrong one, backticks name one that would help."""


def find_raising_node(error: BaseException, objects: Mapping[str, Any], otherwise: str = "") -> str:
    """
    Return the node of the innermost method in the traceback: one node may be opened while another reads from it.

    Return `otherwise` if the traceback contains no method of these objects.
    """
    names = {id(item): name for name, item in objects.items()}
    innermost, trace = otherwise, error.__traceback__
    while trace is not None:
        # By identity: a local variable may be any object, even one equal to all others.
        innermost = names.get(id(trace.tb_frame.f_locals.get("self")), innermost)
        trace = trace.tb_next
    return innermost


def locate_setting(node: Node, message: str, variables: Mapping[str, Leaf]) -> Position | None:
    """
    Return the position where the setting in a message, or the variable used as its value, is written.

    Return the node's position if the message names no written setting. Return None for a node of a shipped recipe,
    since the cause is not written there.
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
