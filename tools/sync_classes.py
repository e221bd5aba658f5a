"""Generates the synchronous classes and functions from the asynchronous ones: same names, same signatures, no await."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
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
    first: dict[str, str] = {}
    """What methods try first, as source: a shorter way."""


class GeneratedModule(Struct, frozen=True):
    """A module that is written by `scripts/reference`."""

    path: str
    purpose: str
    classes: tuple[ClassToWrap, ...] = ()
    functions: str = ""
    """A package whose coroutine functions are wrapped."""
    imports: tuple[str, ...] = ()


def _module_name(module: GeneratedModule) -> str:
    return module.path.removesuffix(".py").replace("/", ".")


ATOMIC: Final = GeneratedModule(
    path="keyloft/tuples/sync/atomic.py",
    purpose="Atomic writes for threads and scripts: every method of `Atomic`, run to its end.",
    imports=("from keyloft.core.driving import Driven",),
    classes=(
        ClassToWrap(
            source="keyloft.tuples.atomic.Atomic",
            name="SyncAtomic",
            purpose="Collects checks and writes; `commit` writes all of it or nothing.",
            first={
                "commit": "if self.decide is not None:\n"
                "    return self._inner._decided(self.decide(self._inner._batch()))"
            },
            added='''
decide: Callable[[Batch], Verdict] | None = None
"""What `commit` commits with, if the engine can do so without a coroutine."""
''',
        ),
    ),
)
STORE: Final = GeneratedModule(
    path="keyloft/tuples/sync/store.py",
    purpose="The tuple store for threads and scripts: every method of `Store`, run to its end.",
    imports=(
        "from keyloft.core.closing import SyncClosing",
        "from keyloft.core.driving import Driven",
        "from keyloft.core.values import encode as encode_value",
        "from keyloft.tuples.no_subscripts import NoSubscripts",
    ),
    classes=(
        ClassToWrap(
            source="keyloft.tuples.store.Store",
            name="SyncStore",
            purpose="An open store for any thread. Get one from `keyloft.open_sync`; close it with `close`, or use "
            "`with`.",
            bases=("NoSubscripts", "SyncClosing"),
            leave_out=frozenset({"aclose"}),
            first={
                "update": "fn = plain_function(fn)",
                "get": "if self.get_record is not None:\n"
                "    record = self.get_record(encode(key))\n"
                "    return entry_of(tuple(key), record, None if type is None else codec_of(type), default)",
                "get_many": "if self.get_records is not None:\n"
                "    wanted = several(keys)\n"
                "    found = self.get_records(encode_many(wanted, ITEM))\n"
                "    return entries_at(wanted, found, codec_or_none(type))",
                "atomic": "if self.decide is not None:\n"
                "    atomic = SyncAtomic(self._inner.atomic(), self._driver)\n"
                "    atomic.decide = self.decide\n"
                "    return atomic",
                "set": "if self.set_value is not None and type is None and expire_in is None and expire_at is None:\n"
                "    data, encoding = encode_value(value, self._inner._max_value_bytes)\n"
                "    version = self.set_value(encode(key), data, encoding)\n"
                "    note_commit(version)\n"
                "    return version\n"
                "if self.commit_batch is not None:\n"
                "    due = expiry(expire_in, expire_at)\n"
                "    version = self.commit_batch(Batch((self._inner._set(key, value, type, due),))).version\n"
                "    note_commit(version)\n"
                "    return version",
            },
            added='''
loop_side: LoopSide | None = None
"""What `on_a_loop` opens, if the store itself has no event loop."""
get_record: Callable[[bytes], Record | None] | None = None
"""What `get` reads with, if its engine can do so without a coroutine."""
get_records: Callable[[Sequence[bytes]], Page | list[Record | None]] | None = None
"""The same for `get_many`."""
set_value: Callable[[bytes, bytes, int], int] | None = None
"""The same for `set` without type and expiry."""
commit_batch: Callable[[Batch], Committed] | None = None
"""The same for what any other `set` commits, a batch without checks."""
decide: Callable[[Batch], Verdict] | None = None
"""The same for what `atomic` commits."""

def __enter__(self) -> Self:
    self._inner._check_open()
    return self

def close(self) -> None:
    """Finish the writes under way, end the watches and close the database. A second call does nothing."""
    close_store(self._inner, self._driver, self.loop_side)

@property
def engine(self) -> Engine:
    """The engine below, as `Store.engine`."""
    return self._inner.engine

def on_a_loop(self) -> "tuple[Store, LoopThread]":
    """The same database in an event loop, and what runs it: for locks and others with work in the background."""
    if self.loop_side is not None:
        return self.loop_side.opened()
    assert isinstance(self._driver, LoopThread)
    return self._inner, self._driver
''',
        ),
    ),
)
WORKFLOWS: Final = GeneratedModule(
    path="keyloft/semantic/sync/workflows.py",
    purpose="What is built on the semantic store, for threads and scripts: checkpoints, flags and others.",
    imports=("from keyloft.core.driving import Driven",),
    classes=(
        ClassToWrap(
            source="keyloft.semantic.checkpoints.Checkpoint",
            name="SyncCheckpoint",
            purpose="The position that a workflow has reached.",
        ),
        ClassToWrap(
            source="keyloft.semantic.index_versions.IndexVersion",
            name="SyncIndexVersion",
            purpose="The active version of an index.",
        ),
        ClassToWrap(
            source="keyloft.semantic.flags.Flags",
            name="SyncFlags",
            purpose="The flags of a project, at `flags/<name>`.",
        ),
        ClassToWrap(
            source="keyloft.semantic.dead_letters.DeadLetters",
            name="SyncDeadLetters",
            purpose="Writes that were given up: list them, retry them, or drop them.",
            leave_out=frozenset({"keep", "save", "save_last", "store", "retry_row", "drop_row"}),
        ),
    ),
)
SEMANTIC: Final = GeneratedModule(
    path="keyloft/semantic/sync/store.py",
    purpose="The semantic store for threads and scripts: every method, run by an event loop in a thread.",
    classes=(
        ClassToWrap(
            source="keyloft.semantic.store.SemanticStore",
            name="SyncSemanticStore",
            purpose="Entries with meaning, on an open synchronous store: each write says what it expects, who writes "
            "it and what for.",
            bases=("SyncSemanticBase",),
            leave_out=frozenset({"aclose", "engine", "write", "check_intent", "check_operations"}),
            added='''
@property
def dead_letters(self) -> SyncDeadLetters:
    """Writes that were given up: to be listed, retried or dropped."""
    return SyncDeadLetters(self._inner.dead_letters, self._driver)
''',
        ),
    ),
)
ADMIN: Final = GeneratedModule(
    path="keyloft/admin/sync.py",
    purpose="The functions of `keyloft.admin` without `await`: `from keyloft.admin import sync as admin`.",
    functions="keyloft.admin",
    imports=("from keyloft import admin as asynchronous", "from keyloft.core.drivers import iterate_alone, run_alone"),
)
MODULES: Final = (ATOMIC, STORE, WORKFLOWS, SEMANTIC, ADMIN)

WRAPPERS: Final = {
    "AsyncIterator": "Iterator",
    "Atomic": "SyncAtomic",
    "AuditTrail": "SyncList",
    "Checkpoint": "SyncCheckpoint",
    "Children": "SyncList",
    "DeadLetterList": "SyncList",
    "EntryWatch": "SyncEntryWatch",
    "EnvelopeList": "SyncList",
    "Flags": "SyncFlags",
    "HeldLocks": "SyncList",
    "IndexVersion": "SyncIndexVersion",
    "Listing": "SyncListing",
    "LiveFlags": "SyncLiveFlags",
    "Lock": "SyncLock",
    "Retry": "SyncRetry",
    "Store": "SyncStore",
    "Watching": "SyncWatching",
}
"""What a method returns, and what it returns in the synchronous class."""
NEED_THE_LOOP: Final = frozenset({"EntryWatch", "Watching"})
HOMES: Final = {
    "SyncList": "keyloft.core.driving",
    "SyncListing": "keyloft.tuples.sync.lists",
    "SyncWatching": "keyloft.tuples.sync.lists",
    "AuditRecord": "keyloft.semantic.audit",
    "close_store": "keyloft.tuples.sync.closing",
    "Callable": "collections.abc",
    "Sequence": "collections.abc",
    "entries_at": "keyloft.tuples.entries",
    "encode_many": "keyloft.core.keys",
    "Page": "keyloft.core.records",
    "Verdict": "keyloft.core.engine",
    "Batch": "keyloft.core.records",
    "Record": "keyloft.core.records",
    "LoopSide": "keyloft.tuples.sync.loop_side",
    "Engine": "keyloft.core.engine",
    "LoopThread": "keyloft.core.drivers",
    "Self": "typing",
    "note_commit": "keyloft.core.own_commits",
    "plain_function": "keyloft.core.driving",
    "SyncEntryWatch": "keyloft.semantic.sync.helpers",
    "SyncLiveFlags": "keyloft.semantic.sync.helpers",
    "SyncLock": "keyloft.semantic.sync.helpers",
    "SyncRetry": "keyloft.semantic.sync.helpers",
    "SyncSemanticBase": "keyloft.semantic.sync.base",
    "Iterator": "collections.abc",
    "iterate": "keyloft.core.driving",
    **{wrapped.name: _module_name(module) for module in MODULES for wrapped in module.classes},
}
ITEM_OF: Final = {
    "AuditTrail": "AuditRecord",
    "Children": "TupleKey",
    "DeadLetterList": "DeadLetter",
    "EnvelopeList": "Envelope",
    "HeldLocks": "Envelope",
}
"""The items of lists that are not generic."""
WORDING: Final = (
    (r": await it, or use `async for`", ": iterate it, or call `all`"),
    (r"(?m)\bawait (\w+\.(?:list|keys|children|locks|audit)\(.*\))$", r"\1.all()"),
    (r"\bawait ", ""),
    (r"\basync (for|with|def)\b", r"\1"),
    (r"[Aa]wait it for a list, or iterate it", "Iterate it, or call `all` for a list"),
    (
        r"copy of the default; returns the new value, or an awaitable of it\b",
        "copy of the default; returns the new value",
    ),
    (r"any number of tasks and processes", "any number of threads and processes"),
    (r"= SemanticStore\(", "= SyncSemanticStore("),
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
    if module.functions:
        package = importlib.import_module(module.functions)
        for name in package.__all__:
            function = getattr(package, name)
            if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                bodies.append(_function(function))
                names |= _used(bodies[-1]) - {"asynchronous"}
                sources.append(sys.modules[function.__module__])
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
    docs: dict[str, str] = {}
    origins = []
    for each in reversed(kind.__mro__):
        if each.__module__.rpartition(".")[0] != package:
            continue
        origins.append(sys.modules[each.__module__])
        for method, versions in _public_methods(each).items():
            if doc := ast.get_docstring(versions[-1]):
                docs[method] = doc
            elif method in docs:  # a method without one has that of the base
                versions[-1].body.insert(0, ast.Expr(ast.Constant(docs[method])))
            if method not in wrapped.leave_out:
                methods[method] = [_Sync(name, len(versions) > 1).visit(version) for version in versions]
                if method in wrapped.first:
                    methods[method][-1].body[-1:-1] = ast.parse(wrapped.first[method]).body
    body = "\n".join(ast.unparse(version) for versions in methods.values() for version in versions)
    bases = ", ".join([*wrapped.bases, *([] if "SyncSemanticBase" in wrapped.bases else [f"Driven[{name}]"])])
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


def _function(function: Any) -> str:
    """The source of a function that runs a coroutine function to its end."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.AsyncFunctionDef)
    node.args.args.insert(0, ast.arg("self"))
    made = _Sync("", False).visit(node)
    made.args.args.pop(0)
    runner = "iterate_alone" if inspect.isasyncgenfunction(function) else "run_alone"
    made.body[-1] = ast.parse(f"return {runner}(asynchronous.{node.name}({_arguments(node.args, 0)}))").body[0]
    return ast.unparse(ast.fix_missing_locations(made))


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
            if returned == "AsyncIterator":
                text = f"return iterate({call}, self._driver)"
            elif is_async:
                text = f"return self._run({call})"
            elif returned == self._owner and self._owner == "Atomic":
                text = f"{call}\nreturn self"
            elif returned in WRAPPERS:
                if returned in NEED_THE_LOOP:
                    passed = ", ".join(filter(None, (f"{self._inner}.{node.name}", _arguments(node.args))))
                    call = f"self._driver.call({passed})"
                text = f"return {WRAPPERS[returned]}({call}, self._driver)"
            else:
                text = f"return {call}"
            body = ast.parse(text).body
            if doc := ast.get_docstring(node):
                body.insert(0, ast.Expr(ast.Constant(_indented(_reworded(doc)))))
        node.args = _Annotations({}).visit(node.args)
        made = ast.FunctionDef(node.name, node.args, body, node.decorator_list)
        made.returns = None if node.returns is None else _Annotations(WRAPPERS).visit(node.returns)
        return ast.fix_missing_locations(made)


class _Annotations(ast.NodeTransformer):
    """Turns the types of arguments and results into the synchronous ones."""

    def __init__(self, wrappers: dict[str, str]) -> None:
        self._wrappers = wrappers

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._wrappers and node.id in ITEM_OF:
            return ast.parse(f"{self._wrappers[node.id]}[{ITEM_OF[node.id]}]", mode="eval").body
        return ast.Name(self._wrappers.get(node.id, node.id), ast.Load())

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


def _arguments(arguments: ast.arguments, first: int = 1) -> str:
    """The arguments of a call that passes all parameters on, but for `self`."""
    named = [*arguments.posonlyargs, *arguments.args][first:]
    parts = [each.arg for each in named]
    if arguments.vararg is not None:
        parts.append(f"*{arguments.vararg.arg}")
    parts += [f"{each.arg}={each.arg}" for each in arguments.kwonlyargs]
    if arguments.kwarg is not None:
        parts.append(f"**{arguments.kwarg.arg}")
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
        if name in HOMES:
            yield f"from {HOMES[name]} import {name}"
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


def shape(source: str) -> str:
    """What a source says, without its format and the order of its imports."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not isinstance(node, ast.ImportFrom)]
    return ast.dump(tree)


def write() -> None:
    """Write the modules that are out of date, formatted."""
    for path, text in modules().items():
        if not path.exists() or shape(path.read_text("utf-8")) != shape(text):
            path.write_text(text, "utf-8")
            ruff = [sys.executable, "-m", "ruff"]
            subprocess.run([*ruff, "check", "--quiet", "--fix", "--select", "I", str(path)], check=True)
            subprocess.run([*ruff, "format", "--quiet", str(path)], check=True)
            sys.stderr.write(f"{path.relative_to(ROOT)} is written\n")


def _stub_generated_modules() -> None:
    """Let Keyloft be imported although a generated module is out of date, or missing."""

    class Stub:
        """Stands for any class of a generated module."""

        __class_getitem__ = classmethod(lambda cls, _: cls)

    for module in MODULES:
        stub: Any = ModuleType(_module_name(module))
        stub.__getattr__ = lambda name: Stub
        sys.modules[stub.__name__] = stub


if __name__ == "__main__":
    _stub_generated_modules()
    write()
