"""The example is a project of its own; `test_example.py` runs its tests where it is installed."""

collect_ignore = ["perplexity"]
