"""The source of components, read without importing it: classes by module, with the types that their members have."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
PORTS = "components/ports/"
KERNELS = ("kernels/attention/options.py", "kernels/results.py")
STATE = ("components/state/batch.py", "components/state/step_state.py", *KERNELS)
"""Modules whose names `drawloom.ports` has besides the ports."""

MANY = {"list", "Sequence", "Iterable", "Iterator", "tuple", "Ordered", "set", "Collection"}
MAPPINGS = {"dict", "Mapping", "Every"}


@attrs.frozen
class Type:
    """A class of the source: one object of it, many, or a mapping to such objects."""

    file: str
    name: str
    shape: str = "one"


@attrs.frozen(eq=False)
class Module:
    """A file of components, with its classes, functions and what it imports from others, by name."""

    file: str
    tree: ast.Module
    classes: dict[str, ast.ClassDef]
    functions: dict[str, ast.FunctionDef]
    imports: dict[str, str]

    def type_of(self, annotation: ast.expr | None) -> Type | None:
        """The type that an annotation in this module names, as far as its class is in the source."""
        match annotation:
            case ast.Name(id=name):
                return self._named(name)
            case ast.Constant(value=str() as text):
                return self.type_of(ast.parse(text, mode="eval").body)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.type_of(left) or self.type_of(right)
            case ast.Subscript(value=ast.Name(id="Literal")):
                return None  # its strings name no types
            case ast.Subscript(value=ast.Name(id=outer), slice=inner):
                last = inner.elts[-1 if outer in MAPPINGS else 0] if isinstance(inner, ast.Tuple) else inner
                found = self.type_of(last)
                shape = "map" if outer in MAPPINGS else "many" if outer in MANY else "one"
                is_known = shape != "one" or outer in ("Annotated", "type")
                return attrs.evolve(found, shape=shape) if found and is_known else None
        return None

    def _named(self, name: str) -> Type | None:
        if name in self.classes:
            return Type(self.file, name)
        file = self.imports.get(name)
        if file == "ports.py":
            file = _public_classes().get(name)
        return Type(file, name) if file in modules() and name in modules()[file].classes else None


@cache
def modules() -> dict[str, Module]:
    """Every file below components/, and modules of kernels in `drawloom.ports`, by its path from the root."""
    paths = [*sorted((ROOT / "components").rglob("*.py")), *(ROOT / file for file in KERNELS)]
    return {str(path.relative_to(ROOT)): _read(str(path.relative_to(ROOT))) for path in paths}


@cache
def _public_classes() -> dict[str, str]:
    """The files of the classes in `drawloom.ports`, by name."""
    return {
        name: file for file, module in modules().items() if file.startswith((PORTS, *STATE)) for name in module.classes
    }


def _read(file: str) -> Module:
    tree = ast.parse((ROOT / file).read_bytes())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    imports: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drawloom."):
            path = (node.module or "").removeprefix("drawloom.").replace(".", "/") + ".py"
            imports |= {alias.asname or alias.name: path for alias in node.names}
    return Module(file, tree, classes, functions, imports)


def ancestry(cls: Type) -> Iterator[tuple[Module, ast.ClassDef]]:
    """A class and those that it inherits from, as far as they are in the source."""
    module = modules()[cls.file]
    node = module.classes[cls.name]
    yield module, node
    for base in node.bases:
        if found := module.type_of(base):
            yield from ancestry(found)


def member(cls: Type, name: str) -> tuple[Type, Type | None] | None:
    """The class in which a member is declared, and the type of the member or of what it returns."""
    for module, node in ancestry(cls):
        for statement in node.body:
            match statement:
                case ast.FunctionDef(name=found, returns=annotation) if found == name:
                    return Type(module.file, node.name), module.type_of(annotation)
                case ast.AnnAssign(target=ast.Name(id=found), annotation=annotation) if found == name:
                    return Type(module.file, node.name), module.type_of(annotation)
                case ast.FunctionDef(name="__init__") if kept := _kept(module, statement, name):
                    return Type(module.file, node.name), kept
    return None


def method(cls: Type, name: str) -> tuple[Module, ast.FunctionDef] | None:
    """A method, and the module that it is in."""
    for module, node in ancestry(cls):
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                return module, statement
    return None


def _kept(module: Module, function: ast.FunctionDef, name: str) -> Type | None:
    """The type of an argument that `__init__` keeps as the attribute `name`."""
    types = {argument.arg: module.type_of(argument.annotation) for argument in function.args.args}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=kept)], value=ast.Name(id=given)):
                if kept == name and types.get(given):
                    return types[given]
    return None


def summary(node: ast.AST) -> str:
    """The first line of a docstring; empty without one."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    text = ast.get_docstring(node) if isinstance(node, documented) else None
    return (text or "").partition("\n")[0]
