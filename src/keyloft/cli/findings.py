"""Prints what `check` and `doctor` find: with a mark and colours at a terminal, a line each in a pipe."""

from collections.abc import Iterable
from typing import Final

from keyloft.admin import Finding
from keyloft.cli.terminal import is_for_people, say

_MARKS: Final = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red"), "skipped": ("-", "dim")}
_CODE_WIDTH: Final = 10


def show_findings(findings: Iterable[Finding]) -> None:
    """Print findings."""
    for finding in findings:
        what = f"{finding.where}: {finding.what}" if finding.where else finding.what
        if is_for_people():
            _show_to_people(finding, what)
        else:
            say(f"{finding.severity}: {finding.code}: {what}{f' -> {finding.cure}' if finding.cure else ''}")


def _show_to_people(finding: Finding, what: str) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    mark, colour = _MARKS[finding.severity]
    row = Table.grid(Column(width=1), Column(min_width=_CODE_WIDTH), Column(overflow="fold"), padding=(0, 1))
    row.add_row(Text(mark, style=colour), Text(finding.code, style="bold"), Text(what))
    if finding.cure:
        row.add_row("", "", Text(finding.cure, style=colour))
    Console(highlight=False).print(row)
