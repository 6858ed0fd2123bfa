"""Patterns of names."""

from drawloom.components.adapters.targets import find_pattern_fault, list_matching_patterns, matches


def test_a_pattern_matches_a_name_or_its_end_after_a_dot() -> None:
    """`norm` is not the end of `q_norm`; layer numbers are compared whole."""
    assert matches("a.b.q_proj", "q_proj") and matches("a.b.q_proj", "b.*") and matches("q_proj", "q_proj")
    assert not matches("a.q_norm", "norm") and not matches("layers.11.mlp", "layers.1.mlp")
    assert list_matching_patterns("layers.3.mlp", ["layers.[0-2].mlp", "layers.[3-5].mlp", "mlp"]) == [
        "layers.[3-5].mlp",
        "mlp",
    ]


def test_no_patterns_are_refused() -> None:
    """An empty list or name would train nothing without a word."""
    assert find_pattern_fault(["x"]) is None
    assert find_pattern_fault([]) and find_pattern_fault(["x", ""])
