"""The language server: requests of editors (LSP 3.17) on standard input and output, answered from the workspace."""

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from drawloom.graph.lsp.completion import Kind, completions, replaced
from drawloom.graph.lsp.cursor import Cursor
from drawloom.graph.lsp.definition import definitions
from drawloom.graph.lsp.diagnostics import Diagnostic, diagnose
from drawloom.graph.lsp.hover import hover
from drawloom.graph.lsp.meaning import Meaning
from drawloom.graph.lsp.references import References, Symbol, ranges, rename, symbol_at
from drawloom.graph.lsp.workspace import Workspace
from drawloom.graph.problems import Place, UserError
from drawloom.graph.project import Project

ICONS: dict[Kind, lsp.CompletionItemKind] = {
    "node": lsp.CompletionItemKind.Struct,
    "key": lsp.CompletionItemKind.Field,
    "value": lsp.CompletionItemKind.Value,
    "component": lsp.CompletionItemKind.Class,
    "variable": lsp.CompletionItemKind.Variable,
    "recipe": lsp.CompletionItemKind.File,
}

WATCHED = "**/*.toml"


class RecipeServer(LanguageServer):
    """A language server with the workspace of an editor; documents are sent as a whole, since they are short."""

    def __init__(self, project: Project) -> None:
        package = importlib.import_module(project.registry.package.partition(".")[0])
        version = getattr(package, "__version__", "0")
        super().__init__("drawloom", version, text_document_sync_kind=lsp.TextDocumentSyncKind.Full)
        self.recipes = Workspace(project)
        self.uris: dict[Path, str] = {}

    def publish(self, path: Path) -> None:
        """Check an open document, and send its problems."""
        if not (self.recipes.contains(path) and self.recipes.is_recipe(path)):
            return
        found = [self._diagnostic(path, one) for one in diagnose(self.recipes, path)]
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(self.uris[path], found))

    def publish_dependents(self, path: Path) -> None:
        """Check the open documents that extend a file."""
        for other in self.recipes.dependents(path):
            self.publish(other)

    def _diagnostic(self, path: Path, found: Diagnostic) -> lsp.Diagnostic:
        severity = lsp.DiagnosticSeverity.Warning if found.problem.warning else lsp.DiagnosticSeverity.Error
        related = []
        if found.elsewhere is not None and found.elsewhere.line:
            related = [lsp.DiagnosticRelatedInformation(self.location(found.elsewhere), found.problem.text)]
        return lsp.Diagnostic(
            self.range(path, found.start, found.end),
            found.message,
            severity=severity,
            code=found.problem.code,
            source="drawloom",
            related_information=related or None,
        )

    def location(self, place: Place) -> lsp.Location:
        """A place as editors name it."""
        path = Path(place.source).resolve()
        line = self.recipes.text(path).split("\n")[max(place.line - 1, 0) :][:1]
        column = self.workspace.position_codec.client_num_units("".join(line)[: max(place.column - 1, 0)])
        position = lsp.Position(max(place.line - 1, 0), column)
        return lsp.Location(self.uri(path), lsp.Range(position, position))

    def uri(self, path: Path) -> str:
        """The URI of a file: as the editor writes it, if it is open."""
        return self.uris.get(path) or from_fs_path(str(path)) or str(path)

    def range(self, path: Path, start: int, end: int) -> lsp.Range:
        """A range of a file, in the units of the editor."""
        text = self.recipes.text(path)
        return lsp.Range(self._position(text, start), self._position(text, end))

    def _position(self, text: str, offset: int) -> lsp.Position:
        # Not by pygls's own lines, which also end at U+2028 and others that are no line ends in TOML.
        begin = text.rfind("\n", 0, offset) + 1
        return lsp.Position(
            text.count("\n", 0, offset), self.workspace.position_codec.client_num_units(text[begin:offset])
        )

    def offset(self, path: Path, position: lsp.Position) -> int:
        """The offset of a position in an open document."""
        lines = self.recipes.text(path).split("\n")
        found = self.workspace.position_codec.position_from_client_units(lines, position)
        return sum(len(line) + 1 for line in lines[: found.line]) + found.character

    def meaning(self, path: Path, position: lsp.Position) -> Meaning | None:
        """What a position in an open recipe means; None if it means nothing, as in other files."""
        if not (self.recipes.contains(path) and self.recipes.is_recipe(path)):
            return None
        cursor = Cursor.at(self.recipes.text(path), self.offset(path, position))
        return Meaning.of(self.recipes, self.recipes.known(path), cursor) if cursor else None

    def symbol(self, path: Path, position: lsp.Position) -> Symbol | None:
        """The node or variable that is named at a position in an open recipe."""
        meaning = self.meaning(path, position)
        return symbol_at(meaning, self.offset(path, position)) if meaning else None


def path_of(uri: str) -> Path:
    """The resolved path of a document."""
    return Path(to_fs_path(uri) or uri).resolve()


def make_server(project: Project) -> RecipeServer:
    """The server with all that it answers."""
    server = RecipeServer(project)
    server.feature(lsp.INITIALIZE)(initialize)
    server.feature(lsp.INITIALIZED)(initialized)
    server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)(did_open)
    server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)(did_change)
    server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)(did_close)
    server.feature(lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES)(did_change_files)
    server.feature(lsp.TEXT_DOCUMENT_HOVER)(hovered)
    server.feature(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionOptions(trigger_characters=[*"\"'@$.["]))(complete)
    server.feature(lsp.TEXT_DOCUMENT_DEFINITION)(define)
    server.feature(lsp.TEXT_DOCUMENT_REFERENCES)(refer)
    server.feature(lsp.TEXT_DOCUMENT_PREPARE_RENAME)(prepare_rename)
    server.feature(lsp.TEXT_DOCUMENT_RENAME)(rename_all)
    return server


def initialize(server: RecipeServer, params: lsp.InitializeParams) -> None:
    """Take the folders of the workspace and the packages of `import` in the options, which the person configures."""
    uris = [folder.uri for folder in params.workspace_folders or ()] or [params.root_uri or ""]
    folders = tuple(path_of(uri) for uri in uris if uri)
    if folders and folders[0].is_dir():
        os.chdir(folders[0])  # paths in recipes are relative to where commands are called
    options: Any = params.initialization_options
    packages = options.get("import", []) if isinstance(options, dict) else []
    project = server.recipes.project
    try:
        project = project.importing([packages] if isinstance(packages, str) else packages)
    except UserError as error:
        server.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, str(error)))
    server.recipes = Workspace(project, folders)


def initialized(server: RecipeServer, _params: lsp.InitializedParams) -> None:
    """Ask for changes of files that are not open, which open documents may extend."""
    workspace = server.client_capabilities.workspace
    watched = workspace and workspace.did_change_watched_files
    if watched and watched.dynamic_registration:
        options = lsp.DidChangeWatchedFilesRegistrationOptions([lsp.FileSystemWatcher(WATCHED)])
        method = lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES
        server.client_register_capability(lsp.RegistrationParams([lsp.Registration("recipes", method, options)]))


def did_open(server: RecipeServer, params: lsp.DidOpenTextDocumentParams) -> None:
    """Check a document."""
    _update(server, params.text_document.uri, params.text_document.text)


def did_change(server: RecipeServer, params: lsp.DidChangeTextDocumentParams) -> None:
    """Check a document, and those that extend it."""
    _update(server, params.text_document.uri, params.content_changes[-1].text)


def _update(server: RecipeServer, uri: str, text: str) -> None:
    path = path_of(uri)
    server.uris[path] = uri
    server.recipes.texts[path] = text
    server.publish(path)
    server.publish_dependents(path)


def did_close(server: RecipeServer, params: lsp.DidCloseTextDocumentParams) -> None:
    """Forget a document: others see the file again."""
    path = path_of(params.text_document.uri)
    server.recipes.texts.pop(path, None)
    server.recipes.analyses.pop(path, None)
    uri = server.uris.pop(path, params.text_document.uri)
    server.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, []))
    server.publish_dependents(path)


def did_change_files(server: RecipeServer, params: lsp.DidChangeWatchedFilesParams) -> None:
    """Check the documents that extend files which were changed outside of the editor."""
    for path in {other for change in params.changes for other in server.recipes.dependents(path_of(change.uri))}:
        server.publish(path)


def hovered(server: RecipeServer, params: lsp.HoverParams) -> lsp.Hover | None:
    """Explain the key or value at a position."""
    path = path_of(params.text_document.uri)
    meaning = server.meaning(path, params.position)
    text = hover(server.recipes, meaning) if meaning else ""
    if not meaning or not text:
        return None
    # Preformatted: the columns of the text are aligned.
    content = lsp.MarkupContent(lsp.MarkupKind.Markdown, f"```text\n{text}\n```")
    return lsp.Hover(content, server.range(path, meaning.cursor.start, meaning.cursor.end))


def complete(server: RecipeServer, params: lsp.CompletionParams) -> lsp.CompletionList:
    """Offer what may be written at a position; editors filter it by what is typed."""
    path = path_of(params.text_document.uri)
    meaning = server.meaning(path, params.position)
    if meaning is None:
        return lsp.CompletionList(is_incomplete=False, items=[])
    start, end = replaced(meaning, server.offset(path, params.position))
    where = server.range(path, start, end)
    items = [
        lsp.CompletionItem(
            label=one.text.strip('"'),
            kind=ICONS[one.kind],
            detail=one.doc,
            sort_text=f"{'0' if one.preferred else '1'}{number:04}",
            filter_text=one.text if meaning.cursor.quoted else one.text.strip('"'),
            text_edit=lsp.TextEdit(where, one.text),
        )
        for number, one in enumerate(completions(server.recipes, meaning))
    ]
    return lsp.CompletionList(is_incomplete=False, items=items)


def define(server: RecipeServer, params: lsp.DefinitionParams) -> list[lsp.Location]:
    """Where what is at a position is defined."""
    meaning = server.meaning(path_of(params.text_document.uri), params.position)
    return [server.location(place) for place in definitions(server.recipes, meaning)] if meaning else []


def refer(server: RecipeServer, params: lsp.ReferenceParams) -> list[lsp.Location]:
    """Where the node or variable at a position is named, its tables included."""
    path = path_of(params.text_document.uri)
    symbol = server.symbol(path, params.position)
    files = References.of(server.recipes, path, symbol).files if symbol else {}
    return [
        lsp.Location(server.uri(file), server.range(file, at.start, at.end))
        for file, found in files.items()
        for at in found
    ]


def prepare_rename(server: RecipeServer, params: lsp.PrepareRenameParams) -> lsp.PrepareRenamePlaceholder | None:
    """The range of the name at a position, if it may be renamed."""
    path = path_of(params.text_document.uri)
    symbol = server.symbol(path, params.position)
    offset = server.offset(path, params.position)
    found = [*ranges(server.recipes.text(path), symbol)] if symbol else []
    at = next((one for one in found if one.start <= offset <= one.end), None)
    return lsp.PrepareRenamePlaceholder(server.range(path, at.start, at.end), symbol[-1]) if at and symbol else None


def rename_all(server: RecipeServer, params: lsp.RenameParams) -> lsp.WorkspaceEdit | None:
    """The edits that rename a node or variable in all recipes that are merged with each other."""
    path = path_of(params.text_document.uri)
    symbol = server.symbol(path, params.position)
    try:
        files = rename(server.recipes, path, symbol, params.new_name) if symbol else {}
    except UserError as error:
        raise JsonRpcInvalidParams(str(error)) from error
    edits = {
        server.uri(file): [lsp.TextEdit(server.range(file, at.start, at.end), params.new_name) for at in found]
        for file, found in files.items()
    }
    return lsp.WorkspaceEdit(edits) if edits else None


def serve(project: Project) -> None:
    """Serve one editor until it says so, or closes the input."""
    # Components that print while they are imported must not write between the messages.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    make_server(project).start_io(stdout=stdout)
