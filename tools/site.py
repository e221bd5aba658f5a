"""Adapts the documents to MkDocs, whose Markdown is stricter than that of the repository's pages.

MkDocs calls `on_page_markdown` for each page (`hooks` in mkdocs.yml).
"""

import re
from pathlib import PurePosixPath
from typing import Any, Final

_FENCE: Final = re.compile(r"^```(\w+) .+$", re.MULTILINE)
_LIST_AFTER_TEXT: Final = re.compile(r"^(?!\s*[-*|>#]|\s*\d+\.|```|\s*$)(.*)\n(?=(?:- |\d+\. ))", re.MULTILINE)
_LINK: Final = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]*)(?:#[^)\s]*)?\)")
_BLOCK: Final = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page with plain fences, a blank line before each list, and no links to files outside docs/."""
    folder = PurePosixPath(page.file.src_uri).parent
    parts = _BLOCK.split(markdown)
    for index, part in enumerate(parts):
        if part.startswith("```"):
            parts[index] = _FENCE.sub(r"```\1", part)
        else:
            part = _LIST_AFTER_TEXT.sub(r"\1\n\n", part)
            parts[index] = _LINK.sub(lambda link: link[1] if _is_outside(folder, link[2]) else link[0], part)
    return "".join(parts)


def _is_outside(folder: PurePosixPath, link: str) -> bool:
    """Whether a relative link leaves docs/; the site has no address of the repository to link to."""
    depth = len(folder.parts)
    return link.count("../") > depth
