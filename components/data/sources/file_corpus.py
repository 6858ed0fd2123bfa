"""Base class for corpora in files that globs select."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from drawloom.components.data.sources.documents import Part, iterate_texts, wrap_parts_for_split
from drawloom.components.data.sources.files import File, find_files
from drawloom.components.ports.corpus import Split
from drawloom.graph import between, component_base_class, setting


@component_base_class
class FileCorpus:
    """
    Base for texts in files, ordered by file.

    A document's split depends only on its text: documents can be moved and added, and copies are never in both splits.
    If there are only a few documents, their ends are validation data.
    """

    paths: list[str] = setting(
        globs=True,
        check=lambda paths: None if paths else "an empty list names no file",
        doc="globs for files, relative to the current directory; `**` crosses folders",
    )
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of documents held out for evaluation; 0: none"
    )

    @abstractmethod
    def divide_files(self, files: Sequence[File]) -> Sequence[Part]:
        """Divide files into independently readable parts."""

    def check_before_open(self) -> None:
        """Read the first document. Raises UserError for a glob without a file, or a malformed document."""
        next(iterate_texts(self.divide_files(find_files(self.paths)[:1])), None)

    def documents(self, split: Split) -> Iterator[str]:
        """Return a split's texts. Raises UserError with the position of a malformed document."""
        return iterate_texts(self.parts(split))

    def parts(self, split: Split) -> list[Part]:
        """Return a split's documents in independently readable parts."""
        return [*wrap_parts_for_split(self.divide_files(find_files(self.paths)), split, self.validation_fraction)]
