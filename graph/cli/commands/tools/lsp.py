"""start the language server (LSP) for an editor, on stdin and stdout"""

from drawloom.graph.cli.command import Command, Project, UserError, command


@command
class LspCommand(Command):
    """The language server for recipes."""

    def run(self, project: Project) -> None:
        try:
            from drawloom.graph.lsp.server import serve_language_server  # needs pygls, an extra
        except ModuleNotFoundError as error:
            package = (error.name or "pygls").partition(".")[0]
            raise UserError(f"the package {package!r} is missing; pip install 'drawloom[lsp]'") from error
        serve_language_server(project)
