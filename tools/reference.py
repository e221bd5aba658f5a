"""Generates from the code: the references, the documents of both APIs, the table of settings, synchronous modules."""

import importlib
import inspect
import json
import re
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
MODULES: Final = ("keyloft", "keyloft.plugins", "keyloft.semantic", "keyloft.admin")
HEAD: Final = """\
# Reference

The public names, with their signatures and docstrings. This page is written by `scripts/reference`: change the
docstrings, not the page. How to use them is in the guides for [the tuple store](../guides/TUPLE_STORE.md),
[plugins](../guides/PLUGIN_KV_STORAGE.md) and [workflows](../guides/SEMANTIC_STORE.md).

`Key` stands for `tuple[str | bytes | int | float | bool, ...] | list[Any]`: a tuple, in most cases."""

HTTP_HEAD: Final = """\
# The HTTP API, path by path

Every path and method, with its parameters and answers. This page and [openapi.json](openapi.json) are written by
`scripts/reference` from the tables of routes; a running service shows the document at `/openapi.json`. How to use the
API is in [its guide](../guides/HTTP_API.md).

A path of the tuple store has a second form, for a named store: `/v1/db/{store}/kv/…` instead of `/v1/kv/…`. Refusals
are `application/problem+json` with `type`, `title`, `status`, `detail` and `code`."""

_BEHIND: Final = {
    "DatabaseClient": ("kv", "PluginKV"),
    "Flags": ("live()", "LiveFlags"),
    "SemanticStore": ("dead_letters", "DeadLetters"),
}
"""Classes that are reached through an attribute of a public class, and have no public name."""

_KEY: Final = ("tuple[str | bytes | int | float | bool, ...] | list[Any]", "Key")
_WIDTH: Final = 100
_SECTION: Final = re.compile(r"(Args|Returns|Raises|Example):$")
_ITEM: Final = re.compile(r"([\w.]+): (.*)")
_OBJECT: Final = re.compile(r"<[\w.]+(?: object)? at 0x[0-9a-f]+>")
_SETTINGS: Final = re.compile(r"(<!-- settings: .*? -->\n).*?(<!-- end of settings -->)", re.DOTALL)


def documents() -> dict[Path, str]:
    """The documents as they should be."""
    service = ROOT / "docs" / "DATABASE_SERVICE.md"
    return {
        ROOT / "docs" / "api" / "REFERENCE.md": reference(),
        ROOT / "docs" / "api" / "asyncapi.json": asyncapi(),
        ROOT / "docs" / "api" / "openapi.json": openapi(),
        ROOT / "docs" / "api" / "HTTP.md": http_reference(),
        service: _SETTINGS.sub(lambda found: found[1] + settings() + found[2], service.read_text("utf-8")),
    }


def asyncapi() -> str:
    """The services on NATS as an AsyncAPI document."""
    from keyloft.server.asyncapi import document

    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


def openapi() -> str:
    """The HTTP API as an OpenAPI document."""
    from keyloft.http.app import whole_document

    return json.dumps(whole_document(), indent=2, ensure_ascii=False) + "\n"


def http_reference() -> str:
    """The HTTP API as a page: each path and method, what it takes, and what it answers."""
    from keyloft.http.app import whole_document

    document = whole_document()
    lines = [HTTP_HEAD]
    for path, methods in document["paths"].items():
        if "{store}" in path:
            continue
        for method, operation in methods.items():
            lines += ["", f"## {method.upper()} {path}", "", f"{operation['summary']}.", ""]
            lines += _http_parameters(operation, document)
            lines += ["| Status | Answer |", "|---|---|"]
            for status, answer in operation["responses"].items():
                kinds = ", ".join([f"`{kind}`" for kind in answer.get("content", {})])
                if "$ref" not in answer:
                    lines.append(f"| {status} | {answer['description']} {kinds}".rstrip() + " |")
            refused = [status for status, answer in operation["responses"].items() if "$ref" in answer]
            lines += ["", f"Refusals: {', '.join(refused)}."]
    lines += ["", "## Refusals", "", "| Status | Why |", "|---|---|"]
    for status, meaning in document["components"]["responses"].items():
        lines.append(f"| {status.removeprefix('Problem')} | {meaning['description']} |")
    return "\n".join(lines) + "\n"


def _http_parameters(operation: dict[str, Any], document: dict[str, Any]) -> Iterator[str]:
    rows = [(each["name"], each["in"], each["description"]) for each in operation["parameters"]]
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        name = content["schema"].get("$ref", "").rpartition("/")[2]
        schema = document["components"]["schemas"].get(name, content["schema"])
        fields = ", ".join(map("`{}`".format, schema.get("properties", {})))
        an_object = "An empty object." if schema.get("type") == "object" else "The value."
        rows.append(("body", kind, f"An object with {fields}." if fields else an_object))
    if rows:
        yield from ["| Parameter | In | |", "|---|---|---|"]
        yield from [f"| `{name}` | {place} | {explained} |" for name, place, explained in rows]
        yield ""


def settings() -> str:
    """The settings of the service as a table."""
    from keyloft.server.config import SETTINGS

    lines = ["| Flag, environment | Default | |", "|---|---|---|"]
    for setting in SETTINGS.values():
        shown = f"`{setting.default_text}`" if setting.default_text else ""
        if setting.metavar == "SECONDS" and setting.default % 86_400 == 0:
            days = int(setting.default // 86_400)
            shown += f" ({days} {'day' if days == 1 else 'days'})"
        choices = f" One of {', '.join(f'`{choice}`' for choice in setting.choices)}." if setting.choices else ""
        about = setting.description.replace("|", "\\|").replace("<", "\\<")
        lines.append(f"| `{setting.flag}`<br>`{setting.environment}` | {shown} | {about}{choices} |")
    return "\n".join([*lines, ""])


def reference() -> str:
    """The public names, as a page."""
    parts = [HEAD]
    for name in MODULES:
        module = importlib.import_module(name)
        parts += [f"## {name}", *_docstring(module)]
        public = {each: getattr(module, each) for each in module.__all__}
        errors = [each for each in public.values() if inspect.isclass(each) and issubclass(each, Exception)]
        for each in sorted(public, key=lambda each: (inspect.isclass(public[each]), each)):
            if inspect.isclass(public[each]) and public[each] in errors:
                continue
            if typing.get_origin(public[each]) is not None:
                parts += [f"### {each}", f"The type `{_annotation(public[each])}`."]
            elif not inspect.isclass(public[each]):
                parts += _function(f"### {each}", public[each])
            else:
                parts += _class(each, public[each])
        if errors:
            parts += _errors(errors)
    return "\n\n".join(parts) + "\n"


def _class(name: str, kind: type) -> Iterator[str]:
    yield f"### {name}"
    yield from _docstring(kind)
    # Most objects are returned by a call; the others have a documented constructor.
    if "__init__" in vars(kind) and vars(kind)["__init__"].__doc__:
        yield _signature(vars(kind)["__init__"], skip=1)
        yield from _docstring(vars(kind)["__init__"])
    if attributes := list(_attributes(kind)):
        yield "\n".join(attributes)
    for member, value in _members(kind).items():
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if not member.startswith("_") and inspect.isfunction(function):
            yield from _function(f"#### {name}.{member}", function, skip=0 if isinstance(value, staticmethod) else 1)
    if kind.__name__ in _BEHIND:
        attribute, helper = _BEHIND[kind.__name__]
        yield from _class(f"{name}.{attribute}", getattr(importlib.import_module(kind.__module__), helper))


def _within_package(kind: type) -> list[type]:
    """A class and those of its bases that belong to the same package, which no other heading may document."""
    package = kind.__module__.rpartition(".")[0]
    return [each for each in reversed(kind.__mro__) if each.__module__.rpartition(".")[0] == package]


def _members(kind: type) -> dict[str, Any]:
    return {name: value for each in _within_package(kind) for name, value in vars(each).items()}


def _attributes(kind: type) -> Iterator[str]:
    for each in _within_package(kind):
        for name, annotation in inspect.get_annotations(each).items():
            if not name.startswith("_"):
                yield f"- `{name}`: `{_annotation(annotation)}`"
    for name, value in _members(kind).items():
        if isinstance(value, property) and not name.startswith("_"):
            returned = _annotation(inspect.signature(value.fget).return_annotation) if value.fget else "Any"
            about = " ".join((inspect.getdoc(value) or "").split())
            yield f"- `{name}`: `{returned}`, read-only. {about}".rstrip()


def _function(heading: str, function: Any, *, skip: int = 0) -> Iterator[str]:
    yield heading
    yield _signature(function, skip=skip)
    yield from _docstring(function)


def _signature(function: Any, *, skip: int) -> str:
    """The signature as Python; `skip` leaves out self or cls."""
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=_Shown(_annotation(each.annotation)))
        for each in list(signature.parameters.values())[skip:]
    ]
    head = f"{'async ' if inspect.iscoroutinefunction(function) else ''}def {function.__name__}"
    returned = f" -> {_annotation(signature.return_annotation)}: ..."
    shown = _OBJECT.sub("...", str(inspect.Signature(parameters)))
    line = f"{head}{shown}{returned}"
    if len(line) > _WIDTH:
        line = "\n".join([f"{head}(", *[f"    {part}," for part in _split(shown[1:-1])], f"){returned}"])
    return f"```python signature\n{line}\n```"


class _Shown(str):
    """An annotation that `inspect` shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _annotation(annotation: Any) -> str:
    if typing.get_origin(annotation) in (
        typing.Union,
        types.UnionType,
    ):  # which Python shows as X | Y depends on its version
        return " | ".join(map(_annotation, typing.get_args(annotation))).replace(*_KEY)
    if annotation is types.NoneType:
        return "None"
    shown = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    shown = re.sub(r"ForwardRef\('([^']+)'\)", r"\1", shown)
    # A reader does not need module names, nor the mark of a type variable.
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Za-z_])|~", "", shown).replace(*_KEY)


def _split(parameters: str) -> Iterator[str]:
    """The parameters one by one; commas inside brackets don't separate them."""
    depth = begun = 0
    for index, character in enumerate(f"{parameters},"):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            yield parameters[begun:index].strip()
            begun = index + 1


def _docstring(documented: Any) -> Iterator[str]:
    """A docstring in Google's style, as paragraphs of Markdown."""
    lines = (inspect.getdoc(documented) or "").splitlines()
    paragraph: list[str] = []
    while lines:
        section = _SECTION.match(lines[0])
        if section or lines[0].startswith("    ") or not lines[0].strip():
            if paragraph:
                yield "\n".join(paragraph)
            paragraph = []
        if section:
            lines.pop(0)
            body = list(_body(lines, section[1]))
            yield _as_text(body) if section[1] == "Example" else f"{section[1]}:\n\n{_items(body)}"
        elif lines[0].startswith("    "):
            yield _as_text(list(_body(lines, "")))
        elif line := lines.pop(0).strip():
            paragraph.append(line)
    if paragraph:
        yield "\n".join(paragraph)


def _body(lines: list[str], section: str) -> Iterator[str]:
    """Remove and yield a section's lines. In a docstring that begins with «Args:» they are not indented."""
    taken = []
    while lines and (
        not lines[0].strip() or lines[0].startswith(" ") or (section == "Args" and _ITEM.match(lines[0]) is not None)
    ):
        taken.append(lines.pop(0))
    yield from inspect.cleandoc("\n".join(["", *taken])).splitlines()


def _items(body: list[str]) -> str:
    lines = []
    for line in body:
        found = _ITEM.match(line)
        lines.append(f"- `{found[1]}`: {found[2]}" if found else f"  {line.strip()}")
    return "\n".join(line for line in lines if line.strip())


def _as_text(body: list[str]) -> str:
    return "\n".join(["```text", *body, "```"])


def _errors(kinds: list[type]) -> Iterator[str]:
    yield "### Errors"
    yield "All are a `KeyloftError`. The code is stable."
    lines = ["| Error | Code | Kind of | |", "|---|---|---|---|"]
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__ if not base.__name__.startswith("_"))
        about = (inspect.getdoc(kind) or "").splitlines()[0]
        lines.append(f"| `{kind.__name__}` | `{getattr(kind, 'code', '')}` | {bases} | {about} |")
    yield "\n".join(lines)


def main() -> None:
    """Write the synchronous modules and the documents that are out of date."""
    # In a process of its own: it runs also if the synchronous modules can't be imported, because they are out of date.
    subprocess.run([sys.executable, "-m", "tools.sync_classes"], cwd=ROOT, check=True)
    for path, text in documents().items():
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")
            sys.stderr.write(f"{path.relative_to(ROOT)} is written\n")


if __name__ == "__main__":
    main()
