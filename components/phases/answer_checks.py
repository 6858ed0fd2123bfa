"""Checks for rows with answers, and their loss."""

from collections.abc import Iterator

from drawloom import NodeView, Problem
from drawloom.ports import find_sharing_problems, uses_preference_pairs, uses_unpaired_answers


def find_answer_problems(rows: NodeView, loss: NodeView, executor: NodeView) -> Iterator[Problem]:
    """Yield a problem if pairs, or unpaired answers, are in the rows or in the loss only, and for shared prompts."""
    if uses_preference_pairs(rows.component) and not uses_preference_pairs(loss.component):
        text = f"[{loss.name}] would learn both documents of each pair in [{rows.name}]"
        yield loss.problem("use", text, 'write use = "loss.dpo"')
    elif uses_preference_pairs(loss.component) and not uses_preference_pairs(rows.component):
        text = f"[{loss.name}] compares pairs of documents, and [{rows.name}] makes none"
        yield rows.problem("use", text, 'write use = "data.packing.pairs"')
    judged = [node for node in rows.reachable() if uses_unpaired_answers(node.component)]
    if judged and not uses_unpaired_answers(loss.component):
        text = f"[{judged[0].name}] has answers that are good or bad by themselves"
        yield loss.problem("use", text, 'write use = "loss.kto"')
    elif uses_unpaired_answers(loss.component) and not judged:
        text = f"[{loss.name}] learns from answers that are good or bad by themselves, and the data have none"
        yield loss.problem("use", text, 'write use = "data.feedback" in the corpus, or use = "loss.dpo"')
    stages = executor.neighbour("stages")
    model = stages.neighbour("model") if stages else None
    if model and rows.settings.get("share_prompts"):
        yield from find_sharing_problems(rows, model)
