"""The language server (LSP 3.17): answers requests of editors on standard input and output from the workspace."""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.uris import from_fs_path, to_fs_path

from drawloom.graph.lsp.completion import Kind, find_replaced_range, list_completions
from drawloom.graph.lsp.cursor import Cursor
from drawloom.graph.lsp.diagnostics import Diagnostic, diagnose
from drawloom.graph.lsp.hover import describe_token
from drawloom.graph.lsp.references import (
    References,
    Symbol,
    find_definitions,
    find_rename_ranges,
    find_symbol,
    find_symbol_ranges,
)
from drawloom.graph.lsp.workspace import Meaning, Workspace
from drawloom.graph.problems import Position, UserError
from drawloom.graph.project import Project

ICONS: dict[Kind, lsp.CompletionItemKind] = {
    "node": lsp.CompletionItemKind.Struct,
    "key": lsp.CompletionItemKind.Field,
    "value": lsp.CompletionItemKind.Value,
    "component": lsp.CompletionItemKind.Class,
    "variable": lsp.CompletionItemKind.Variable,
    "recipe": lsp.CompletionItemKind.File,
}

WATCHED_FILES = "**/*.toml"


class RecipeServer(LanguageServer):
    """Language server with the workspace of an editor. Documents are sent as a whole, because they are short."""

    def __init__(self, project: Project) -> None:
        package = importlib.import_module(project.registry.package.partition(".")[0])
        version = getattr(package, "__version__", "0")
        super().__init__("drawloom", version, text_document_sync_kind=lsp.TextDocumentSyncKind.Full)
        self.recipe_workspace = Workspace(project)
        self.uris: dict[Path, str] = {}

    def publish_diagnostics(self, path: Path) -> None:
        """Check an open document and send its problems."""
        if not self.recipe_workspace.is_recipe(path):
            return
        diagnostics = [
            self._to_lsp_diagnostic(path, diagnostic) for diagnostic in diagnose(self.recipe_workspace, path)
        ]
        self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(self.uris[path], diagnostics))

    def publish_diagnostics_of_dependents(self, path: Path) -> None:
        """Check the open documents extending a file."""
        for other in self.recipe_workspace.list_open_dependents(path):
            self.publish_diagnostics(other)

    def _to_lsp_diagnostic(self, path: Path, diagnostic: Diagnostic) -> lsp.Diagnostic:
        severity = lsp.DiagnosticSeverity.Warning if diagnostic.problem.warning else lsp.DiagnosticSeverity.Error
        related = []
        if diagnostic.position_in_other_file is not None and diagnostic.position_in_other_file.line:
            related = [
                lsp.DiagnosticRelatedInformation(
                    self.to_lsp_location(diagnostic.position_in_other_file), diagnostic.problem.text
                )
            ]
        return lsp.Diagnostic(
            self.to_lsp_range(path, (diagnostic.start, diagnostic.end)),
            diagnostic.message,
            severity=severity,
            code=diagnostic.problem.code,
            source="drawloom",
            related_information=related or None,
        )

    def to_lsp_location(self, position: Position) -> lsp.Location:
        """Convert a position to a location of the protocol."""
        path = Path(position.source).resolve()
        line = self.recipe_workspace.text(path).split("\n")[max(position.line - 1, 0) :][:1]
        column = self.workspace.position_codec.client_num_units("".join(line)[: max(position.column - 1, 0)])
        start = lsp.Position(max(position.line - 1, 0), column)
        return lsp.Location(self.find_uri(path), lsp.Range(start, start))

    def find_uri(self, path: Path) -> str:
        """Return a file's URI, as the editor writes it if the file is open."""
        return self.uris.get(path) or from_fs_path(str(path)) or str(path)

    def to_lsp_range(self, path: Path, offsets: tuple[int, int]) -> lsp.Range:
        """Convert a range of a file, from a start to an end offset, to the editor's units."""
        text = self.recipe_workspace.text(path)
        start, end = (self._to_lsp_position(text, offset) for offset in offsets)
        return lsp.Range(start, end)

    def _to_lsp_position(self, text: str, offset: int) -> lsp.Position:
        # Not by pygls's lines, which also end at U+2028 and other characters that do not end a line in TOML.
        line_start = text.rfind("\n", 0, offset) + 1
        return lsp.Position(
            text.count("\n", 0, offset), self.workspace.position_codec.client_num_units(text[line_start:offset])
        )

    def to_offset(self, path: Path, position: lsp.Position) -> int:
        """Return a position's offset in an open document."""
        lines = self.recipe_workspace.text(path).split("\n")
        start = self.workspace.position_codec.position_from_client_units(lines, position)
        return sum(len(line) + 1 for line in lines[: start.line]) + start.character

    def find_meaning(self, path: Path, position: lsp.Position) -> Meaning | None:
        """Return a position's meaning in an open recipe. None if it has no meaning, or in other files."""
        if not self.recipe_workspace.is_recipe(path):
            return None
        cursor = Cursor.at(self.recipe_workspace.text(path), self.to_offset(path, position))
        return (
            Meaning.from_cursor(self.recipe_workspace, self.recipe_workspace.get_last_analysis_or_empty(path), cursor)
            if cursor
            else None
        )

    def find_symbol_at(self, path: Path, position: lsp.Position) -> Symbol | None:
        """Return the node or variable named at a position in an open recipe, or None."""
        meaning = self.find_meaning(path, position)
        return find_symbol(meaning, self.to_offset(path, position)) if meaning else None


def path_from_uri(uri: str) -> Path:
    """Return a document's resolved path."""
    return Path(to_fs_path(uri) or uri).resolve()


def initialize(server: RecipeServer, params: lsp.InitializeParams) -> None:
    """Read the workspace folders, and the packages of `import` in the options from the user's configuration."""
    uris = [folder.uri for folder in params.workspace_folders or ()] or [params.root_uri or ""]
    folders = tuple(path_from_uri(uri) for uri in uris if uri)
    if folders and folders[0].is_dir():
        os.chdir(folders[0])  # paths in recipes are relative to the current directory
    options: Any = params.initialization_options
    packages = options.get("import", []) if isinstance(options, dict) else []
    project = server.recipe_workspace.project
    try:
        project = project.with_imports([packages] if isinstance(packages, str) else packages)
    except UserError as error:
        server.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, str(error)))
    server.recipe_workspace = Workspace(project, folders)


def request_file_events(server: RecipeServer, _params: lsp.InitializedParams) -> None:
    """Ask for changes of closed files, since open documents may extend them."""
    workspace = server.client_capabilities.workspace
    capability = workspace and workspace.did_change_watched_files
    if capability and capability.dynamic_registration:
        options = lsp.DidChangeWatchedFilesRegistrationOptions([lsp.FileSystemWatcher(WATCHED_FILES)])
        method = lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES
        server.client_register_capability(lsp.RegistrationParams([lsp.Registration("recipes", method, options)]))


def did_open_or_change(server: RecipeServer, path: Path, params: Any) -> None:
    """Check an opened or changed document, and the documents extending it."""
    is_opened = isinstance(params, lsp.DidOpenTextDocumentParams)
    newest = params.text_document if is_opened else params.content_changes[-1]
    server.uris[path] = params.text_document.uri
    server.recipe_workspace.texts[path] = newest.text
    server.publish_diagnostics(path)
    server.publish_diagnostics_of_dependents(path)


def did_close(server: RecipeServer, path: Path, params: lsp.DidCloseTextDocumentParams) -> None:
    """Forget a closed document. Other documents see the file again."""
    server.recipe_workspace.texts.pop(path, None)
    server.recipe_workspace.analyses.pop(path, None)
    uri = server.uris.pop(path, params.text_document.uri)
    server.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, []))
    server.publish_diagnostics_of_dependents(path)


def did_change_files(server: RecipeServer, params: lsp.DidChangeWatchedFilesParams) -> None:
    """Check the documents extending files changed outside the editor."""
    for path in {
        other
        for change in params.changes
        for other in server.recipe_workspace.list_open_dependents(path_from_uri(change.uri))
    }:
        server.publish_diagnostics(path)


def show_hover(server: RecipeServer, path: Path, params: lsp.HoverParams) -> lsp.Hover | None:
    """Explain the key or value at a position."""
    meaning = server.find_meaning(path, params.position)
    text = describe_token(server.recipe_workspace, meaning) if meaning else ""
    if not meaning or not text:
        return None
    # Preformatted, because the columns of the text are aligned.
    content = lsp.MarkupContent(lsp.MarkupKind.Markdown, f"```text\n{text}\n```")
    return lsp.Hover(content, server.to_lsp_range(path, (meaning.cursor.start, meaning.cursor.end)))


def complete(server: RecipeServer, path: Path, params: lsp.CompletionParams) -> lsp.CompletionList:
    """Offer completions at a position. Editors filter them by the typed characters."""
    meaning = server.find_meaning(path, params.position)
    if meaning is None:
        return lsp.CompletionList(is_incomplete=False, items=[])
    edit_range = server.to_lsp_range(path, find_replaced_range(meaning, server.to_offset(path, params.position)))
    items = [
        lsp.CompletionItem(
            label=completion.text.strip('"'),
            kind=ICONS[completion.kind],
            detail=completion.doc,
            sort_text=f"{'0' if completion.preferred else '1'}{number:04}",
            filter_text=completion.text if meaning.cursor.quoted else completion.text.strip('"'),
            text_edit=lsp.TextEdit(edit_range, completion.text),
        )
        for number, completion in enumerate(list_completions(server.recipe_workspace, meaning))
    ]
    return lsp.CompletionList(is_incomplete=False, items=items)


def find_definition(server: RecipeServer, path: Path, params: lsp.DefinitionParams) -> list[lsp.Location]:
    """Return the locations where the token at a position is defined."""
    meaning = server.find_meaning(path, params.position)
    return (
        [server.to_lsp_location(position) for position in find_definitions(server.recipe_workspace, meaning)]
        if meaning
        else []
    )


def list_references(server: RecipeServer, path: Path, params: lsp.ReferenceParams) -> list[lsp.Location]:
    """Return the locations naming the node or variable at a position, including its tables."""
    symbol = server.find_symbol_at(path, params.position)
    files = References.find(server.recipe_workspace, path, symbol).files if symbol else {}
    return [
        lsp.Location(server.find_uri(file), server.to_lsp_range(file, source_range))
        for file, ranges in files.items()
        for source_range in ranges
    ]


def prepare_rename(
    server: RecipeServer, path: Path, params: lsp.PrepareRenameParams
) -> lsp.PrepareRenamePlaceholder | None:
    """Return the name's range at a position, if it may be renamed."""
    symbol = server.find_symbol_at(path, params.position)
    offset = server.to_offset(path, params.position)
    ranges = [*find_symbol_ranges(server.recipe_workspace.text(path), symbol)] if symbol else []
    source_range = next((span for span in ranges if span.start <= offset <= span.end), None)
    return (
        lsp.PrepareRenamePlaceholder(server.to_lsp_range(path, source_range), symbol[-1])
        if source_range and symbol
        else None
    )


def make_rename_edits(server: RecipeServer, path: Path, params: lsp.RenameParams) -> lsp.WorkspaceEdit | None:
    """Return the edits for renaming a node or variable in all recipes merged with each other."""
    symbol = server.find_symbol_at(path, params.position)
    try:
        files = find_rename_ranges(server.recipe_workspace, path, symbol, params.new_name) if symbol else {}
    except UserError as error:
        raise JsonRpcInvalidParams(str(error)) from error
    edits = {
        server.find_uri(file): [
            lsp.TextEdit(server.to_lsp_range(file, source_range), params.new_name) for source_range in ranges
        ]
        for file, ranges in files.items()
    }
    return lsp.WorkspaceEdit(edits) if edits else None


DOCUMENT_HANDLERS: dict[str, Callable[..., Any]] = {
    lsp.TEXT_DOCUMENT_DID_OPEN: did_open_or_change,
    lsp.TEXT_DOCUMENT_DID_CHANGE: did_open_or_change,
    lsp.TEXT_DOCUMENT_DID_CLOSE: did_close,
    lsp.TEXT_DOCUMENT_HOVER: show_hover,
    lsp.TEXT_DOCUMENT_COMPLETION: complete,
    lsp.TEXT_DOCUMENT_DEFINITION: find_definition,
    lsp.TEXT_DOCUMENT_REFERENCES: list_references,
    lsp.TEXT_DOCUMENT_PREPARE_RENAME: prepare_rename,
    lsp.TEXT_DOCUMENT_RENAME: make_rename_edits,
}


def make_server(project: Project) -> RecipeServer:
    """Return a server with handlers for all supported requests."""
    server = RecipeServer(project)
    server.feature(lsp.INITIALIZE)(initialize)
    server.feature(lsp.INITIALIZED)(request_file_events)
    server.feature(lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES)(did_change_files)
    for method, handler in DOCUMENT_HANDLERS.items():

        def handle(params: Any, handler: Callable[..., Any] = handler) -> Any:
            return handler(server, path_from_uri(params.text_document.uri), params)

        completes = method == lsp.TEXT_DOCUMENT_COMPLETION
        server.feature(method, lsp.CompletionOptions(trigger_characters=[*"\"'@$.["]) if completes else None)(handle)
    return server


def serve_language_server(project: Project) -> None:
    """Serve one editor until it ends the session or closes the input."""
    # Components that print during their import must not write between the messages.
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    make_server(project).start_io(stdout=stdout)
