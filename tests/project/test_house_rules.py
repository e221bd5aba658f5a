"""Rules of the house that a reader would otherwise have to watch over."""

import ast
import inspect
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from nats.aio import client, subscription

import keyloft
from keyloft import limits, plugins, semantic

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "keyloft"
MODULES = sorted(SOURCE.rglob("*.py"))
CODE = [
    path for folder in ("src", "tests", "bench", "examples", "tools") for path in sorted((ROOT / folder).rglob("*.py"))
]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
LONGEST_MODULE_LINES = 450

# Words of our own where the field has one; the glossary is in CONTRIBUTING.md.
PRIVATE_WORDS = {
    *("anew", "anybody", "aside", "bus", "complaint", "complaints", "letters", "lobby"),
    *("nobody", "ours", "somebody", "stranger", "theirs", "told", "upkeep", "whoever"),
}
# Here they are meant: a made-up plugin of doctor, a user of Linux, replies of a chat bot, and letters of other kinds.
ALLOWED = re.compile(
    r"keyloft-doctor-nobody|getpwnam\(.nobody.\)|nobody has a point yet|nobody of that name is quoted"
    r"|(dead|lowercase|capital)[ _-]letters"
)
# Of asyncio, os, named tuples and nats-py, whose methods the product overrides or calls.
NOT_OURS = {"_exit", "_process_msg", "_process_pong", "_replace", "_run"}


def name_of(module: Path) -> str:
    return str(module.relative_to(SOURCE))


@cache
def parsed(module: Path) -> ast.Module:
    """To parse all modules of the product takes a second."""
    return ast.parse(module.read_text())


@pytest.mark.parametrize("package", [keyloft, plugins, semantic], ids=lambda package: package.__name__)
def test_every_public_name_says_what_it_is_for(package: ModuleType) -> None:
    bare = [name for name in package.__all__ if not inspect.getdoc(getattr(package, name))]
    assert bare == []


def test_every_module_says_what_its_job_is() -> None:
    bare = [name_of(module) for module in MODULES if not re.match(r'(#.*\n|\s)*"""\s*[^\s"]', module.read_text())]
    assert bare == []


def test_a_package_that_lists_its_modules_names_no_other() -> None:
    """A list of modules is a docstring of a package with at least two of them; a module that was renamed stands out."""
    found = []
    for package in (module for module in MODULES if module.name == "__init__.py"):
        named = set(re.findall(r"`([a-z_]+)`", ast.get_docstring(parsed(package)) or ""))
        present = {path.stem for path in package.parent.iterdir()}
        if len(named & present) > 1:
            found += [f"{name_of(package)}: {name}" for name in sorted(named - present)]
    assert found == []


def test_no_annotation_of_a_class_names_one_of_its_methods() -> None:
    """On Python 3.14 `list[str]` in a class with a method `list` means the method, once a tool reads the annotation."""
    found = []
    for module in MODULES:
        text = module.read_text()
        if not re.search(r"^    (async )?def (list|set|type|bytes|str|int|dict)\(", text, re.MULTILINE):
            continue
        for owner in (node for node in ast.walk(parsed(module)) if isinstance(node, ast.ClassDef)):
            methods = [node for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
            names = {method.name for method in methods}
            for method in methods:
                arguments = [node for node in ast.walk(method.args) if isinstance(node, ast.arg)]
                written = [method.returns, *(argument.annotation for argument in arguments)]
                used = [node for each in written if each for node in ast.walk(each) if isinstance(node, ast.Name)]
                found += [f"{name_of(module)}:{node.lineno} {node.id}" for node in used if node.id in names]
    assert found == []


def test_a_class_name_is_used_once() -> None:
    texts = {module: module.read_text() for module in CODE}
    # To parse all modules takes seconds: only those with a name that appears twice, which may be in a text, are parsed.
    seen = Counter(name for text in texts.values() for name in re.findall(r"^\s*class (\w+)", text, re.MULTILINE))
    doubtful = {name for name, times in seen.items() if times > 1}
    found = defaultdict(list)
    for module, text in texts.items():
        if any(f"class {name}" in text for name in doubtful):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(str(module.relative_to(ROOT)))
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_a_type_alias_of_the_product_has_a_name_of_its_own() -> None:
    found = defaultdict(list)
    for module in MODULES:
        for definition in re.finditer(r"^ *(?:class (\w+)[:(]|(\w+): TypeAlias = )", module.read_text(), re.MULTILINE):
            found[definition[1] or definition[2]].append(name_of(module))
    del found["Progress"]  # of `keyloft.admin`, which is public, and of what engines report to it
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}


def test_private_words_do_not_come_back() -> None:
    """In names, comments, docstrings, messages and documents alike."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word}"
        for path in {*CODE, *DOCUMENTS} - {Path(__file__)}
        for number, line in enumerate(path.read_text().lower().splitlines(), 1)
        for word in PRIVATE_WORDS.intersection(re.findall(r"[a-z]+", ALLOWED.sub("", line)))
    ]
    assert sorted(found) == []


def test_modules_are_short() -> None:
    found = {name_of(module): len(module.read_text().splitlines()) for module in MODULES}
    assert {name: lines for name, lines in found.items() if lines > LONGEST_MODULE_LINES} == {}


def test_only_one_module_uses_private_parts_of_nats_py() -> None:
    private = {
        name
        for library in (client, subscription)
        for name in re.findall(r"self\.(_[a-z]\w*)", inspect.getsource(library))
    }
    used = {
        f"{name_of(module)}: {attribute}"
        for module in MODULES
        if name_of(module) != "nats/messages.py"
        for owner, attribute in re.findall(r"(\w+)\.(_[a-z]\w*)", module.read_text())
        if attribute in private and owner not in ("self", "cls") and "nats" in module.read_text()
    }
    assert used == set()


def test_no_test_uses_private_parts_of_the_product() -> None:
    """A test goes through what is public, if only among Keyloft's own modules; attributes say so: «For tests: …»."""
    product, found = set[str](), []
    for module in MODULES:
        product |= set(re.findall(r"(?:\.|\bdef |\bclass |^)(_[a-z]\w*)", module.read_text(), re.MULTILINE))
    for path in CODE:
        text = path.read_text()
        # To parse them all would take seconds: only those that may use one, by a dot or an import, are parsed.
        used_by_dot = re.findall(r"(?<!\bself)(?<!\bcls)\.(_[a-z]\w*)", text)
        imported = re.findall(r"\b_[a-z]\w*", " ".join(re.findall(r"from keyloft\S* import (\([^)]*\)|.*)", text)))
        if path.is_relative_to(SOURCE) or not (product - NOT_OURS).intersection([*used_by_dot, *imported]):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
        own = {node.attr for node in attributes if getattr(node.value, "id", "") in ("self", "cls")}
        used = [(node.lineno, node.attr) for node in attributes]
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keyloft"):
                used += [(node.lineno, name.name) for name in node.names]
        found += [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in used if name in product - own - NOT_OURS]
    assert found == []


def test_nothing_but_a_command_or_the_entry_of_a_process_ends_the_process() -> None:
    ends = [
        f"{name_of(module)}: {found}"
        for module in MODULES
        for found in re.findall(r"\bos\._exit|\bsys\.exit|\bSystemExit|\bos\.abort", module.read_text())
        if not name_of(module).startswith("cli/") and module.name != "__main__.py"
    ]
    assert ends == []


def test_every_limit_says_what_it_does_and_has_a_name_of_its_own() -> None:
    """By a string below it; all are names of the package."""
    names, bare = Counter[str](), []
    for module in sorted((SOURCE / "limits").glob("*.py")):
        body = parsed(module).body
        for node, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
                names[name] += 1
                if not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)):
                    bare.append(name)
    assert bare == []
    assert [name for name, times in names.items() if times > 1] == []
    assert names.keys() == {name for name in vars(limits) if name.isupper()}


def test_no_hint_names_a_package_that_was_not_published() -> None:
    """Nothing has been published: `pip install ".[nats]"` works in a clone, `pip install keyloft` does not."""
    hints = [
        f"{name_of(module)}: {found}"
        for module in MODULES
        for found in re.findall(r"pip install [^`\n]*\bkeyloft\b\S*", module.read_text())
        if "clone" not in found
    ]
    assert hints == []
