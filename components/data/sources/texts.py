"""Text files, and the base class for corpora in files."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import attrs

from drawloom import UserError
from drawloom.components.data.sources.documents import (
    PART_BYTES,
    DividedCorpus,
    Document,
    Part,
    file_globs,
    iterate_texts,
    validation_fraction,
)
from drawloom.components.data.sources.files import File, find_files, group_files, open_file
from drawloom.graph import component_base_class


@component_base_class
class FileCorpus(DividedCorpus):
    """Base for texts in files that globs select, ordered by file."""

    paths: list[str] = file_globs("files")
    validation_fraction: float = validation_fraction("documents")

    @abstractmethod
    def divide_files(self, files: Sequence[File]) -> Sequence[Part]:
        """Divide files into independently readable parts."""

    def check_before_open(self) -> None:
        """Read the first document. Raises UserError for a glob without a file, or a malformed document."""
        next(iterate_texts(self.divide_files(find_files(self.paths)[:1])), None)

    def divide(self) -> Sequence[Part]:
        return self.divide_files(find_files(self.paths))


@attrs.frozen
class TextPart:
    """A few text files; each is a document. Invalid UTF-8 raises UserError, or is replaced by U+FFFD if `replace`."""

    files: tuple[File, ...]
    replace: bool = False

    @property
    def byte_count(self) -> int:
        """Total file size in bytes."""
        return sum(file.size for file in self.files)

    def documents(self) -> Iterator[Document]:
        """Yield the files' texts, with unchanged line ends."""
        for file in self.files:
            with open_file(file) as stream:
                content = stream.read()
            yield Document(_decode_utf8(content, file.path, self.replace), file.path, 0)


def group_text_files(files: Sequence[File], replace_invalid: bool = False) -> list[TextPart]:
    """Group files into parts."""
    return [TextPart(group, replace_invalid) for group in group_files(files, PART_BYTES)]


def _decode_utf8(content: bytes, path: str, replace_invalid: bool) -> str:
    """Decode UTF-8. Raises UserError for an invalid byte, unless `replace_invalid`."""
    try:
        return content.decode("utf-8", "replace" if replace_invalid else "strict")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} (0x{content[error.start]:02x})"
        hint = 'convert the file, leave it out of `paths`, or write invalid_bytes = "replace"'
        raise UserError(f"{path}: {byte} is not UTF-8; {hint}") from error
