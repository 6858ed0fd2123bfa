"""Which functions of components use each member of a port: a small type inference over the source."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from functools import cache

import attrs

from generate.source import PORTS, Module, Type, member, method, modules, summary


@attrs.frozen
class Use:
    """A function that uses a member of a port: its file, its name with that of its class, and what it does."""

    file: str
    function: str
    does: str


@cache
def uses() -> Mapping[tuple[str, str], list[Use]]:
    """The uses of (port, member), in the order of files."""
    found: defaultdict[tuple[str, str], list[Use]] = defaultdict(list)
    for file, module in modules().items():
        if not file.startswith("components/contracts/"):
            for name, node in module.classes.items() if not file.startswith(PORTS) else ():
                for function in node.body:
                    if isinstance(function, ast.FunctionDef):
                        _Function(module, Type(file, name), found).read(function, f"{name}.{function.name}")
            for name, function in module.functions.items():
                _Function(module, None, found).read(function, name)
    return found


@attrs.define
class _Function:
    """One function: the types of its names, and the members of ports that it uses."""

    module: Module
    owner: Type | None
    found: defaultdict[tuple[str, str], list[Use]]
    names: dict[str, Type] = attrs.field(factory=dict)
    narrowed: defaultdict[str, list[Type]] = attrs.field(factory=lambda: defaultdict(list))

    def read(self, function: ast.FunctionDef, name: str) -> None:
        if self.owner and function.args.args and function.args.args[0].arg == "self":
            self.names["self"] = self.owner
        for _ in range(2):  # names are bound before all that uses them has been seen
            for node in ast.walk(function):
                self._bind_all(node)
        use = Use(self.module.file, name, summary(function) or self._of_class())
        for node in (node for node in ast.walk(function) if isinstance(node, ast.Attribute)):
            for owner in self._owners(node.value):
                declared = member(owner, node.attr)
                if declared and declared[0].file.startswith(PORTS):
                    users = self.found[declared[0].name, node.attr]
                    users += [] if use in users else [use]

    def _owners(self, node: ast.expr) -> list[Type]:
        """The types that an expression may have: the one it is annotated with, and those of `isinstance`."""
        narrowed = self.narrowed[node.id] if isinstance(node, ast.Name) else []
        return [owner for owner in (self._type(node), *narrowed) if owner and owner.shape == "one"]

    def _of_class(self) -> str:
        return summary(self.module.classes[self.owner.name]) if self.owner else ""

    def _bind_all(self, node: ast.AST) -> None:
        match node:
            case ast.arg(annotation=annotation) if annotation:
                self._bind(node, self.module.type_of(annotation))
            case ast.Call(func=ast.Attribute() as called, args=[*_, ast.Lambda(args=ast.arguments(args=[argument]))]):
                self._bind(argument, self._type_of_argument(called))
            case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Name(id=name), kind]):
                self.narrowed[name] += [found] if (found := self.module.type_of(kind)) else []
            case ast.Assign(targets=[target], value=value):
                self._bind(target, self._type(value), value)
            case ast.AnnAssign(target=target, annotation=annotation):
                self._bind(target, self.module.type_of(annotation))
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, self._type(value))
            case ast.For(target=target, iter=values) | ast.comprehension(target=target, iter=values):
                self._bind_loop(target, values)

    def _bind_loop(self, target: ast.expr, values: ast.expr) -> None:
        """Bind the target of a loop over a collection, over `items()`, or over several by `zip` or `enumerate`."""
        match target, values:
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=each):
                for one, collection in zip(targets, each, strict=False):
                    self._bind_loop(one, collection)
            case ast.Tuple(elts=[_, one]), ast.Call(func=ast.Name(id="enumerate"), args=[collection, *_]):
                self._bind_loop(one, collection)
            case ast.Tuple(elts=[_, one]), ast.Call(func=ast.Attribute(value=mapping, attr="items")):
                self._bind(one, self._element(mapping))
            case _:
                self._bind(target, self._element(values))

    def _type_of_argument(self, called: ast.Attribute) -> Type | None:
        """What a method gives to the function that is its last argument."""
        owner = self._type(called.value)
        found = method(owner, called.attr) if owner else None
        match found[1].args.args[-1].annotation if found else None:
            case ast.Subscript(slice=ast.Tuple(elts=[ast.List(elts=[given]), _])) if found:
                return found[0].type_of(given)
        return None

    def _bind(self, target: ast.AST, found: Type | None, value: ast.expr | None = None) -> None:
        match target, value:
            case (ast.Name(id=name), _) | (ast.arg(arg=name), _) if found:
                self.names[name] = found
            case ast.Tuple(elts=targets), ast.Tuple(elts=values):
                for one, each in zip(targets, values, strict=False):
                    self._bind(one, self._type(each))

    def _element(self, collection: ast.expr) -> Type | None:
        found = self._type(collection)
        return attrs.evolve(found, shape="one") if found and found.shape in ("many", "map") else None

    def _type(self, node: ast.expr) -> Type | None:
        """The type of an expression, as far as it follows from annotations."""
        match node:
            case ast.Name(id=name):
                return self.names.get(name)
            case ast.Attribute(value=value, attr=name):
                owner = self._type(value)
                declared = member(owner, name) if owner and owner.shape == "one" else None
                return declared[1] if declared else None
            case ast.Call(func=ast.Attribute(value=value, attr="values")) if found := self._type(value):
                return attrs.evolve(found, shape="many")
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Name() as wanted]):
                return self.module.type_of(wanted)  # of a container, by class or port
            case ast.Call(func=ast.Name(id=name)) if name in self.module.functions:
                return self.module.type_of(self.module.functions[name].returns)
            case ast.Call(func=ast.Name() as called):
                return self.module.type_of(called)
            case ast.Call(func=called):
                return self._type(called)
            case ast.Subscript(value=value):
                return self._element(value)
            case ast.BoolOp(values=values):
                return next(filter(None, map(self._type, values)), None)
            case ast.IfExp(body=body, orelse=other):
                return self._type(body) or self._type(other)
        return None
