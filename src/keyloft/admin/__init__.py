"""What operators do with a whole database, as functions; the commands with the same names print their results.

    from keyloft import admin

    await admin.backup("app.db", "nightly.db")
    report = await admin.check("nightly.db")
    await admin.copy("app.db", "postgresql://localhost/app", progress=lambda stage, done, total: print(stage, done))

`from keyloft.admin import sync as admin` has the same functions without `await`. Each function opens the databases that
it is called with and closes them again, while other processes may use them.
"""

from keyloft.admin.backup import BackupReport, RestoreReport, backup, restore
from keyloft.admin.changes import KeyChange, changes
from keyloft.admin.check import CheckReport, Finding, check
from keyloft.admin.compact import CompactReport, DiskUsage, compact
from keyloft.admin.databases import Progress
from keyloft.admin.import_from import ForeignStore, ImportFromReport, import_from
from keyloft.admin.stats import ChangeLogFacts, StatsReport, Tally, stats
from keyloft.admin.transfer import CopyReport, ExportReport, ImportReport, copy, export, import_

__all__ = [
    "BackupReport",
    "ChangeLogFacts",
    "CheckReport",
    "CompactReport",
    "CopyReport",
    "DiskUsage",
    "ExportReport",
    "Finding",
    "ForeignStore",
    "ImportFromReport",
    "ImportReport",
    "KeyChange",
    "Progress",
    "RestoreReport",
    "StatsReport",
    "Tally",
    "backup",
    "changes",
    "check",
    "compact",
    "copy",
    "export",
    "import_",
    "import_from",
    "restore",
    "stats",
]
