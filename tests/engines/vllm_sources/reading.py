"""The Python sources of a vLLM release, read with `ast` and never imported: names, classes, signatures, routes.

Nothing of vLLM has to be installed, so a release that exists only for GPUs can be read. What the sources define at run
time (``setattr``, ``__getattr__``, conditions) is not evaluated.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_METHODS = ("get", "post", "put", "delete", "patch")


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: the statement in a module, or the module itself if ``node`` is one."""

    module: str
    node: ast.AST

    @property
    def as_class(self) -> ast.ClassDef | None:
        return self.node if isinstance(self.node, ast.ClassDef) else None

    @property
    def as_function(self) -> FunctionNode | None:
        return self.node if isinstance(self.node, FunctionNode) else None


@dataclass(frozen=True)
class Route:
    """A function that answers a route."""

    method: str
    path: str
    module: str
    function: FunctionNode


class Sources:
    """The sources under ``root``, the folder that contains ``vllm``. ``replaced`` has other texts of some modules."""

    def __init__(self, root: Path, replaced: Mapping[str, str] | None = None) -> None:
        self.root = root
        self._replaced = dict(replaced or {})
        self._modules: dict[str, ast.Module | None] = {}
        if not (root / "vllm" / "__init__.py").is_file():
            raise FileNotFoundError(f"{root} does not contain the sources of vLLM (vllm/__init__.py)")

    # ------------------------------------------------------------------------------------------------------- modules

    def path_of(self, module: str) -> Path | None:
        """Return the file of a module, None if there is none."""
        path = self.root.joinpath(*module.split("."))
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
        return None

    def text_of(self, module: str) -> str:
        path = self.path_of(module)
        assert path is not None, module
        return self._replaced.get(module) or path.read_text()

    def module(self, name: str) -> ast.Module | None:
        """Return the syntax tree of a module, None if there is none."""
        if name not in self._modules:
            path = self.path_of(name)
            replaced = self._replaced.get(name)
            self._modules[name] = None if path is None else ast.parse(replaced) if replaced else _parsed(path)
        return self._modules[name]

    def modules_under(self, package: str) -> Iterator[str]:
        """Yield the names of a package's modules."""
        folder = self.root.joinpath(*package.split("."))
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    # --------------------------------------------------------------------------------------------------------- names

    def find(self, dotted: str) -> Definition | None:
        """Return what ``package.module.name`` or ``package.module.Class.member`` is, None if it is not there."""
        parts = dotted.split(".")
        for cut in range(len(parts), 0, -1):
            name = ".".join(parts[:cut])
            tree = self.module(name)
            if tree is None:
                continue
            found: Definition | None = Definition(name, tree)
            for part in parts[cut:]:
                found = None if found is None else self._inside(found, part)
            return found
        return None

    def _inside(self, owner: Definition, name: str) -> Definition | None:
        if isinstance(owner.node, ast.Module):
            return self.resolve(owner.module, name)
        return self.members(owner).get(name) if owner.as_class else None

    def resolve(
        self, module: str, name: str, *, in_annotation: bool = False, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> Definition | None:
        """Return what a name means in a module, following imports within vLLM. A submodule counts too.

        What is imported only for type checkers counts in annotations alone.
        """
        tree = self.module(module)
        if tree is None or (module, name) in seen:
            return None
        for node in _statements(tree.body, in_annotation):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                    return Definition(module, node)
                case ast.Assign() if any(isinstance(it, ast.Name) and it.id == name for it in node.targets):
                    return self._value(module, node, node.value)
                case ast.AnnAssign(target=ast.Name(id=target)) if target == name:
                    return self._value(module, node, node.value)
                case ast.ImportFrom():
                    for alias in node.names:
                        if (alias.asname or alias.name) == name:
                            origin = self._origin(module, node)
                            found = self.resolve(
                                origin, alias.name, in_annotation=in_annotation, seen=seen | {(module, name)}
                            )
                            if found is not None or not origin.startswith("vllm"):
                                return found
        if (submodule := self.module(f"{module}.{name}")) is not None:
            return Definition(f"{module}.{name}", submodule)
        return None

    def _value(self, module: str, statement: ast.stmt, value: ast.expr | None) -> Definition:
        return Definition(module, value if isinstance(value, ast.Subscript | ast.BinOp) else statement)

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self.path_of(module)
        parts = module.split(".")
        is_package = path is not None and path.name == "__init__.py"
        parts = parts[: len(parts) - node.level + (1 if is_package else 0)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    # ------------------------------------------------------------------------------------------------------- classes

    def bases(self, found: Definition) -> tuple[list[Definition], list[str]]:
        """Return the bases of a class that vLLM defines, and the names of the others."""
        known: list[Definition] = []
        foreign: list[str] = []
        assert found.as_class is not None
        for base in found.as_class.bases:
            value = base.value if isinstance(base, ast.Subscript) else base
            definition = self.resolve(found.module, value.id) if isinstance(value, ast.Name) else None
            if definition is not None and definition.as_class:
                known.append(definition)
            else:
                foreign.append(ast.unparse(value))
        return known, foreign

    def lineage(self, found: Definition) -> Iterator[Definition]:
        """Yield a class and its bases in vLLM, each before its own bases."""
        yield found
        for base in self.bases(found)[0]:
            yield from self.lineage(base)

    def members(self, found: Definition) -> dict[str, Definition]:
        """Return methods, class attributes and attributes set on ``self`` of a class and its bases."""
        members: dict[str, Definition] = {}
        for cls in self.lineage(found):
            for name, node in _members(cls.as_class):
                members.setdefault(name, Definition(cls.module, node))
        return members

    def fields(self, found: Definition) -> dict[str, Definition]:
        """Return the annotated attributes of a class and its bases, as pydantic and dataclasses have them."""
        fields: dict[str, Definition] = {}
        for cls in self.lineage(found):
            assert cls.as_class is not None
            for node in cls.as_class.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    fields.setdefault(node.target.id, Definition(cls.module, node))
        return fields

    def classes_in(self, module: str, annotation: ast.expr | None) -> list[Definition]:
        """Return the classes of vLLM that an annotation names, inside containers, unions and aliases too."""
        return [it for it in self._named(module, annotation) if it.as_class]

    def literals_in(self, module: str, annotation: ast.expr | None) -> set[str]:
        """Return the strings that an annotation allows with ``Literal``, in aliases too."""
        found: set[str] = set()
        for owner, expression in [
            (module, annotation),
            *((it.module, it.node) for it in self._named(module, annotation)),
        ]:
            for node in ast.walk(expression) if isinstance(expression, ast.expr) else ():
                if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
                    found |= {
                        it.value for it in ast.walk(node) if isinstance(it, ast.Constant) and type(it.value) is str
                    }
                    for name in (it.id for it in ast.walk(node.slice) if isinstance(it, ast.Name)):
                        inner = self.resolve(owner, name, in_annotation=True)
                        if inner is not None and isinstance(inner.node, ast.expr):
                            found |= self.literals_in(inner.module, inner.node)
        return found

    def _named(self, module: str, annotation: ast.AST | None) -> Iterator[Definition]:
        """Yield what the names of an annotation mean; an alias also yields the names in it."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        for node in ast.walk(annotation) if annotation is not None else ():
            if isinstance(node, ast.Name) and (found := self.resolve(module, node.id, in_annotation=True)) is not None:
                yield found
                if isinstance(found.node, ast.expr):
                    yield from self._named(found.module, found.node)

    # -------------------------------------------------------------------------------------------------------- routes

    @functools.cached_property
    def routes(self) -> Mapping[tuple[str, str], list[Route]]:
        """The routes that functions of ``vllm.entrypoints`` are declared to answer, by method and path."""
        routes: dict[tuple[str, str], list[Route]] = {}
        for module in self.modules_under("vllm.entrypoints"):
            if "@" not in self.text_of(module) and "add_api_route" not in self.text_of(module):
                continue
            tree = self.module(module)
            assert tree is not None
            for route in _routes(module, tree):
                routes.setdefault((route.method, route.path), []).append(route)
        return routes


@functools.cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def parameters_of(function: FunctionNode) -> list[str]:
    """Return the names of a function's positional parameters."""
    return [it.arg for it in (*function.args.posonlyargs, *function.args.args)]


def constants_in(node: ast.AST) -> set[object]:
    """Return the constants that occur in a piece of code."""
    return {it.value for it in ast.walk(node) if isinstance(it, ast.Constant)}


def is_abstract(function: FunctionNode) -> bool:
    return any(ast.unparse(it).endswith("abstractmethod") for it in function.decorator_list)


def binding_of(function: FunctionNode) -> str:
    """Return whether a function of a class is an instance, static or class method, or a property."""
    for decorator in map(ast.unparse, function.decorator_list):
        if decorator in ("staticmethod", "classmethod", "property"):
            return decorator
    return "method"


def call_problem(function: FunctionNode, call: ast.Call, *, is_bound: bool) -> str | None:
    """Return why a call does not fit a function's parameters, None if it does. ``is_bound``: without ``self``."""
    arguments = function.args
    names = parameters_of(function)[1 if is_bound else 0 :]
    num = len(call.args)
    if any(isinstance(it, ast.Starred) for it in call.args) or any(it.arg is None for it in call.keywords):
        return None
    if num > len(names) and arguments.vararg is None:
        return f"takes {len(names)} positional arguments, not {num}"
    keywords = {it.arg for it in call.keywords if it.arg is not None}
    known = {*names, *(it.arg for it in arguments.kwonlyargs)}
    if arguments.kwarg is None and (unknown := keywords - known):
        return f"has no parameter {', '.join(sorted(unknown))}"
    if twice := keywords & set(names[:num]):
        return f"gets {', '.join(sorted(twice))} twice"
    required = names[: len(names) - len(arguments.defaults)] if arguments.defaults else names
    required = [*required[num:]] + [
        it.arg for it, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
    ]
    if missing := [name for name in required if name not in keywords]:
        return f"requires {', '.join(missing)}"
    return None


def _statements(body: list[ast.stmt], in_annotation: bool) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under conditions too: the last first, but the first branch first."""
    for node in reversed(body):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not in_annotation:
            yield from _statements(node.orelse, in_annotation)
            continue
        if isinstance(node, ast.If | ast.Try | ast.With):
            for name in ("body", "orelse", "finalbody", "handlers"):
                for inner in reversed(getattr(node, name, [])):
                    yield from _statements(
                        inner.body if isinstance(inner, ast.ExceptHandler) else [inner], in_annotation
                    )
        else:
            yield node


def _members(cls: ast.ClassDef | None) -> Iterator[tuple[str, ast.AST]]:
    assert cls is not None
    for statement in cls.body:
        node: ast.AST = statement
        if isinstance(node, FunctionNode):
            if not any(ast.unparse(it).endswith(("overload", ".setter")) for it in node.decorator_list):
                yield node.name, node
        else:
            yield from ((target.id, node) for target in _targets(node) if isinstance(target, ast.Name))
    for node in ast.walk(cls):
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr, node


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    return list(node.targets) if isinstance(node, ast.Assign) else []


def _routes(module: str, tree: ast.Module) -> Iterator[Route]:
    functions = [it for it in ast.walk(tree) if isinstance(it, FunctionNode)]
    named = {it.name: it for it in functions}
    for function in functions:
        for decorator in function.decorator_list:
            match decorator:
                case ast.Call(func=ast.Attribute(attr=method), args=[ast.Constant(value=path), *_]):
                    if method in _METHODS:
                        yield Route(method.upper(), str(path), module, function)
    for call in ast.walk(tree):
        match call:
            case ast.Call(func=ast.Attribute(attr="add_api_route"), args=[ast.Constant(value=path), ast.Name(id=name)]):
                methods = next((it.value for it in call.keywords if it.arg == "methods"), None)
                for verb in constants_in(methods) if methods is not None and name in named else ():
                    yield Route(str(verb), str(path), module, named[name])
