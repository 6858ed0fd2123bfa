"""Calculator tool: integers and decimal numbers with + - * / and parentheses."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from drawloom.components.environments.function_tool import tool

OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


@tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression such as (2 + 3) * 4."""
    return f"{_compute(ast.parse(expression.strip(), mode='eval').body):.15g}"


def _compute(node: ast.expr) -> Any:
    """Return an expression's value. Raises ValueError for anything but numbers and operations."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=operation, operand=operand) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_compute(operand))
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_compute(left), _compute(right))
    raise ValueError("write numbers with + - * / and parentheses")
