"""Corpus on every machine with Python: the standard library's source, without its tests."""

from collections.abc import Iterator

from drawloom.components.data.sources.documents import Part, iterate_texts, wrap_parts_for_split
from drawloom.components.ports.corpus import Split
from drawloom.graph import between, component, setting


@component
class StandardLibrary:
    """The standard library's source, one document per module, without tests and installed packages."""

    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of files held out for evaluation; 0: none"
    )

    def documents(self, split: Split) -> Iterator[str]:
        """Return a split's texts, ordered by module path."""
        return iterate_texts(self.parts(split))

    def parts(self, split: Split) -> list[Part]:
        """Return a split's documents in independently readable parts."""
        from drawloom.components.data.sources.library_files import list_source_files
        from drawloom.components.data.sources.text import group_text_files

        return [
            *wrap_parts_for_split(
                group_text_files(list_source_files(), replace_invalid=True), split, self.validation_fraction
            )
        ]
