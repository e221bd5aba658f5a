"""Generates the synchronous classes and functions from the asynchronous ones: same names, same signatures, no await."""

import ast
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final

from msgspec import Struct

ROOT: Final = Path(__file__).parent.parent
SOURCE: Final = ROOT / "src"


class ClassToWrap(Struct, frozen=True):
    """A class, and the name of the synchronous one."""

    source: str
    """Its module and name."""
    name: str
    purpose: str
    """The first line of the docstring."""
    bases: tuple[str, ...] = ()
    leave_out: frozenset[str] = frozenset()
    """Methods that make no sense, or that a base of the synchronous class has."""
    added: str = ""
    """Further members, as source."""


class GeneratedModule(Struct, frozen=True):
    """A module that is written by `scripts/reference`."""

    path: str
    purpose: str
    classes: tuple[ClassToWrap, ...] = ()
    functions: str = ""
    """A package whose coroutine functions are wrapped."""
    imports: tuple[str, ...] = ()


STORE: Final = GeneratedModule(
    path="keyloft/tuples/sync/store.py",
    purpose="The tuple store for threads and scripts: every method of `Store` and `Atomic`, run to its end.",
    imports=("from keyloft.core.closing import SyncClosing", "from keyloft.core.driving import Driven"),
    classes=(
        ClassToWrap(
            source="keyloft.tuples.atomic.Atomic",
            name="SyncAtomic",
            purpose="Collects checks and writes; `commit` writes all of it or nothing.",
        ),
        ClassToWrap(
            source="keyloft.tuples.store.Store",
            name="SyncStore",
            purpose="An open store for any thread. Get one from `keyloft.open_sync`; close it with `close`, or use "
            "`with`.",
            bases=("SyncClosing",),
            leave_out=frozenset({"aclose"}),
            added='''
def close(self) -> None:
    """Finish the writes under way, end the watches and close the database. A second call does nothing."""
    close_store(self._inner, self._driver)
''',
        ),
    ),
)
MODULES: Final = (STORE,)

WRAPPERS: Final = {
    "Atomic": "SyncAtomic",
    "Children": "SyncList",
    "Listing": "SyncListing",
    "Store": "SyncStore",
    "Watching": "SyncWatching",
}
"""What a method returns, and what it returns in the synchronous class."""
NEED_THE_LOOP: Final = frozenset({"Watching"})
HAND_WRITTEN: Final = {
    "SyncList": "keyloft.core.driving",
    "SyncListing": "keyloft.tuples.sync.lists",
    "SyncWatching": "keyloft.tuples.sync.lists",
    "close_store": "keyloft.tuples.sync.closing",
}
ITEM_OF: Final = {"Children": "TupleKey"}
"""The items of lists that are not generic."""
WORDING: Final = (
    (r"(?m)\bawait (\w+\.(?:list|keys|children|locks|audit)\(.*\))$", r"\1.all()"),
    (r"\bawait ", ""),
    (r"\basync (for|with|def)\b", r"\1"),
    (r"[Aa]wait it for a list, or iterate it", "Iterate it, or call `all` for a list"),
    (r"returns the new one, or awaits it\b", "returns the new one"),
    (r"any number of tasks and processes", "any number of threads and processes"),
    (r": await it, or use `for`", ": iterate it, or call `all`"),
)
"""How docstrings change, as patterns."""


def modules() -> dict[Path, str]:
    """The generated modules as they should be, not yet formatted."""
    return {SOURCE / module.path: generated(module) for module in MODULES}


def generated(module: GeneratedModule) -> str:
    """The source of a module."""
    names: set[str] = set()
    bodies = []
    sources: list[ModuleType] = []
    for wrapped in module.classes:
        body, used, origins = _class(wrapped)
        bodies.append(body)
        names |= used
        sources += origins
    own = {wrapped.name for wrapped in module.classes}
    imports = [*module.imports, *_imports(names - own, sources)]
    head = f'"""{module.purpose}\n\nWritten by `scripts/reference` from the asynchronous classes: change those.\n"""'
    return "\n\n".join([head, "\n".join(sorted(set(imports))), *bodies]) + "\n"


def _class(wrapped: ClassToWrap) -> tuple[str, set[str], list[ModuleType]]:
    """The source of a synchronous class, the names that it uses, and the modules that define them."""
    module_name, _, name = wrapped.source.rpartition(".")
    kind = getattr(importlib.import_module(module_name), name)
    package = module_name.rpartition(".")[0]
    methods: dict[str, list[ast.FunctionDef]] = {}
    origins = []
    for each in reversed(kind.__mro__):
        if each.__module__.rpartition(".")[0] != package:
            continue
        origins.append(sys.modules[each.__module__])
        for method, versions in _public_methods(each).items():
            if method not in wrapped.leave_out:
                methods[method] = [_Sync(name, len(versions) > 1).visit(version) for version in versions]
    body = "\n".join(ast.unparse(version) for versions in methods.values() for version in versions)
    bases = ", ".join([*wrapped.bases, f"Driven[{name}]"])
    doc = inspect.getdoc(kind) or ""
    _, _, more = doc.partition("\n")
    docstring = _reworded(f"{wrapped.purpose}\n{more}".rstrip())
    if "\n" in docstring:
        docstring += "\n"
    parts = [f'"""{docstring}"""', wrapped.added.strip("\n"), body]
    source = f"class {wrapped.name}({bases}):\n" + textwrap.indent("\n".join(p for p in parts if p), "    ")
    return source, _used(source), origins


def _used(source: str) -> set[str]:
    """The names that a source needs from elsewhere, also those in quoted annotations."""
    used: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("Sync"):
            used |= _used(node.value)
    # What has the name of a parameter is that parameter.
    return used - {each.arg for each in ast.walk(ast.parse(source)) if isinstance(each, ast.arg)}


def _public_methods(kind: type) -> dict[str, list[Any]]:
    """The definitions of each public method and property in a class body, overloads included."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, list[Any]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            found.setdefault(node.name, []).append(node)
    return found


class _Sync(ast.NodeTransformer):
    """Turns a method into the synchronous one."""

    def __init__(self, owner: str, has_overloads: bool) -> None:
        self._owner = owner
        # No overload takes all that the implementation takes.
        self._inner = "self._untyped" if has_overloads else "self._inner"

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.FunctionDef:
        return self._wrapped(node, is_async=True)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return self._wrapped(node, is_async=False)

    def _wrapped(self, node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_async: bool) -> ast.FunctionDef:
        returned = _head(node.returns)
        decorators = {_head(decorator) for decorator in node.decorator_list}
        if "overload" in decorators:
            body: list[ast.stmt] = [ast.Expr(ast.Constant(...))]
        else:
            call = f"{self._inner}.{node.name}" + ("" if "property" in decorators else f"({_arguments(node.args)})")
            if is_async:
                text = f"return self._run({call})"
            elif returned == self._owner and self._owner == "Atomic":
                text = f"{call}\nreturn self"
            elif returned in WRAPPERS:
                if returned in NEED_THE_LOOP:
                    separator = ", " if node.args.args[1:] or node.args.vararg or node.args.kwonlyargs else ""
                    call = f"self._driver.call({self._inner}.{node.name}{separator}{_arguments(node.args)})"
                text = f"return {WRAPPERS[returned]}({call}, self._driver)"
            else:
                text = f"return {call}"
            body = ast.parse(text).body
            if doc := ast.get_docstring(node):
                body.insert(0, ast.Expr(ast.Constant(_indented(_reworded(doc)))))
        node.args = _Annotations().visit(node.args)
        made = ast.FunctionDef(node.name, node.args, body, node.decorator_list)
        made.returns = None if node.returns is None else _Annotations().visit(node.returns)
        return ast.fix_missing_locations(made)


class _Annotations(ast.NodeTransformer):
    """Turns the types of arguments and results into the synchronous ones."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in ITEM_OF:
            return ast.parse(f"{WRAPPERS[node.id]}[{ITEM_OF[node.id]}]", mode="eval").body
        return ast.Name(WRAPPERS.get(node.id, node.id), ast.Load())

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if isinstance(node.value, str) and re.fullmatch(r"[A-Z]\w+(\[.*\])?", node.value):
            return ast.Constant(ast.unparse(self.visit(ast.parse(node.value, mode="eval").body)))
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if _head(node.right) == "Awaitable":
            return self.visit(node.left)  # type: ignore[no-any-return]
        return self.generic_visit(node)


def _head(annotation: ast.expr | None) -> str:
    """The name of a type without its parameters."""
    match annotation:
        case ast.Constant(value=str(text)):
            return _head(ast.parse(text, mode="eval").body)
        case ast.Subscript(value=value):
            return _head(value)
        case ast.Name(id=name):
            return name
    return ""


def _arguments(arguments: ast.arguments) -> str:
    """The arguments of a call that passes all parameters on."""
    named = [*arguments.posonlyargs, *arguments.args][1:]
    parts = [each.arg for each in named]
    if arguments.vararg is not None:
        parts.append(f"*{arguments.vararg.arg}")
    parts += [f"{each.arg}={each.arg}" for each in arguments.kwonlyargs]
    return ", ".join(parts)


def _reworded(doc: str) -> str:
    for pattern, replacement in WORDING:
        doc = re.sub(pattern, replacement, doc)
    return doc


def _indented(doc: str) -> str:
    """A docstring as it stands in a method of a class that is not indented yet."""
    if "\n" not in doc:
        return doc
    return textwrap.indent(doc, "    ", lambda line: bool(line.strip())).lstrip() + "\n    "


def _imports(names: set[str], sources: list[ModuleType]) -> Iterator[str]:
    """The imports of names, from where the sources have them or define them."""
    for name in sorted(names):
        if name in HAND_WRITTEN:
            yield f"from {HAND_WRITTEN[name]} import {name}"
            continue
        for source in sources:
            value = vars(source).get(name)
            if value is None:
                continue
            home = _home(source, name)
            if home != "builtins":
                yield f"from {home} import {name}"
                break


def _home(source: ModuleType, name: str) -> str:
    """The module from which a source imports a name; the source itself, if it defines the name."""
    for node in ast.walk(ast.parse(inspect.getsource(source))):
        if isinstance(node, ast.ImportFrom) and node.module and any(each.name == name for each in node.names):
            return node.module
    return source.__name__


def function_names(package: ModuleType) -> list[str]:
    """The coroutine functions that a package exports."""
    exported = [getattr(package, name) for name in package.__all__]
    return [each.__name__ for each in exported if isinstance(each, FunctionType) and inspect.iscoroutinefunction(each)]
