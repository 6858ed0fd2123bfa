"""Pages made of the files at the root of the repository, whose links lead to the same places in the site."""

import re

from generate.source import ROOT


def root_page(name: str) -> str:
    """A file of the root, with its links as they are in the site."""
    text = (ROOT / name).read_text("utf-8")
    text = re.sub(r"\]\(docs/", "](", text)
    text = re.sub(r"\]\(recipes/\w+/(\w+)\.toml\)", r"](reference/recipes.md#\1)", text)
    return text.replace("](CONTRIBUTING.md)", "](contributing.md)").replace("](CHANGELOG.md)", "](changelog.md)")
