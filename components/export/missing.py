"""Models that can't be exported, refused by all exports."""

from collections.abc import Iterator

from drawloom import NodeView, Problem
from drawloom.ports import ModelWithoutExport


def find_missing_export(node: NodeView) -> Iterator[Problem]:
    """Yield the problem if the model of an export's node can't be exported."""
    if (model := node.neighbour("model")) and issubclass(model.component, ModelWithoutExport):
        text = f"[{model.name}] can't be exported: {model.component.explain_missing_export(model)}"
        remedy = f'write unset = ["{node.name}"], and remove = "@{node.name}" in [edit.trainer.on_finish]'
        yield node.problem("use", text, remedy)
