"""The documents keep their word: every block runs, every link leads somewhere, every table agrees with the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from keyloft import errors, limits
from keyloft.core.health import ServerHealth
from keyloft.nats.errors import WIRE_ERRORS
from keyloft.plugins import BotDatabase
from keyloft.plugins.meters import Meters
from keyloft.plugins.usage import PluginUsage
from keyloft.server.metrics import Metrics
from tests.docs.blocks import LANGUAGES, ROOT, Block, DocumentRun, blocks_of, prose_of
from tests.docs.postgres import DocumentPostgres
from tools import reference

DOCUMENTS = sorted((ROOT / "docs").rglob("*.md"))
GUIDE = ROOT / "docs" / "guides" / "PLUGIN_KV_STORAGE.md"
PROTOCOL = ROOT / "docs" / "api" / "DATABASE_KV_API.md"
SERVICE = ROOT / "docs" / "DATABASE_SERVICE.md"
SEMANTIC = ROOT / "docs" / "guides" / "SEMANTIC_STORE.md"
PLUGIN_CODES = [code for code in WIRE_ERRORS if code not in ("STALE_FENCE", "NOTHING_TO_RESTORE")]


def each(documents: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("document", documents, ids=lambda document: str(document.relative_to(ROOT)))


def section(document: Path, heading: str) -> str:
    """The part of a document below a heading."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", document.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{document.name} has no part {heading}"
    return found[1]


def first_column(text: str) -> list[str]:
    """The codes in the first column of the tables of a text."""
    return [code for cell in re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE) for code in re.findall(r"`(.*?)`", cell)]


# Blocks


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DocumentRun]:
    def databases_for(blocks: list[Block]) -> DocumentPostgres | None:
        if not DocumentPostgres.is_meant_by(blocks):
            return None
        return DocumentPostgres(request.getfixturevalue("postgres_server"), blocks)

    world = DocumentRun(tmp_path, databases_for)
    yield world
    world.end()


@each(DOCUMENTS)
def test_every_block_says_how_it_is_checked(document: Path) -> None:
    for block in blocks_of(document.read_text()):
        allowed = LANGUAGES.get(block.language)
        assert allowed is not None, f"line {block.line}: {block.language!r} is not a language that is checked"
        assert re.fullmatch(allowed, block.purpose), f"line {block.line}: {block.purpose!r} means nothing"


@each([*DOCUMENTS, ROOT / "README.md"])
def test_every_python_block_can_be_pasted_at_a_prompt(document: Path) -> None:
    """There, an empty line ends an indented block, and nothing else does."""
    for block in blocks_of(document.read_text()):
        if (block.language, block.purpose) != ("python", ""):
            continue
        lines, statements = [*block.text.splitlines(), ""], ast.parse(block.text).body
        for statement in [one for one in statements if hasattr(one, "body")]:
            first, after = statement.lineno - 1, statement.end_lineno or 0
            assert all(lines[first:after]), f"line {block.line + first + 1}: an empty line within the block"
            assert not lines[after], f"line {block.line + after + 1}: an empty line is missing"


@each([document for document in DOCUMENTS if blocks_of(document.read_text())])
@pytest.mark.slow
def test_every_block_runs(document: Path, world: DocumentRun) -> None:
    world.run(blocks_of(document.read_text()))


@pytest.mark.parametrize(
    "block",
    [
        "```python\nassert False\n```",
        "```python\nawait nowhere()\n```",
        "```python signature\ndef f(: ...\n```",
        "```sh\nfalse\ntrue\n```",
        "```sh background\nfalse\n```",
        "```json\n{'single': 'quotes'}\n```",
        '```json request db.kv.t.get\n{"key": "k"}\n```\n\n```json reply\n{"success": true, "exists": true}\n```',
        "```sql\nSELECT nothing FROM plugin_kv_storage;\n```",
        "```sql postgres\nSELECT nothing;\n```",
        '```toml\nlog_levle = "debug"\n```',
        "```sh\necho one\n```\n\n```text output\ntwo\n```",
        "```ruby\nputs 1\n```",
    ],
    ids=lambda block: block.partition("\n")[0].strip("`"),
)
@pytest.mark.slow
def test_a_block_that_is_wrong_fails(block: str, world: DocumentRun) -> None:
    with pytest.raises((AssertionError, ValueError, SyntaxError)):
        world.run(blocks_of(block))


# Links


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", prose_of(document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each([*DOCUMENTS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
def test_every_link_leads_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_of(document.read_text())):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


# What the code says as well


def test_what_is_taken_from_the_code_is_up_to_date() -> None:
    for path, text in reference.documents().items():
        assert path.read_text() == text, f"{path.name} is out of date: scripts/reference writes it again"


def test_the_protocol_lists_the_codes_that_a_service_answers_with() -> None:
    assert first_column(section(PROTOCOL, "Errors")) == PLUGIN_CODES


def test_the_guide_lists_the_codes_that_a_client_meets() -> None:
    named = first_column(section(GUIDE, "Errors"))
    of_the_connection = {
        kind.code for kind in (errors.Unanswered, errors.NoService, errors.NotPermitted, errors.TimedOut)
    }
    before_sending = {errors.InvalidKey.code, errors.InvalidValue.code}
    assert set(named) == {*PLUGIN_CODES, *of_the_connection, *before_sending}
    for code, kind in re.findall(r"^\| `([A-Z_]+)` \| `(\w+)` \|", section(GUIDE, "Errors"), re.MULTILINE):
        assert getattr(errors, kind).code == code


def test_the_semantic_guide_lists_the_codes_that_its_users_meet() -> None:
    named = first_column(section(SEMANTIC, "Errors"))
    others = {"INVALID_KEY", "KEY_TOO_LARGE", "INVALID_VALUE", "NO_SERVICE", "NOT_PERMITTED", "TIMED_OUT", "UNANSWERED"}
    own = {"NOTHING_TO_RESTORE", "NOT_FORWARD", "LOCK_HELD", "LOCK_LOST", "ESCALATED"}
    assert set(named) == {*WIRE_ERRORS, *others, *own} - {"INVALID_PLUGIN_NAME", "NOT_A_COUNTER"}
    for codes, kinds in re.findall(r"^\| (`[^|]+) \| (`[^|]+) \|", section(SEMANTIC, "Errors"), re.MULTILINE):
        pairs = zip(re.findall("[A-Z_]{3,}", codes), re.findall(r"\w+", kinds), strict=True)
        assert all(getattr(errors, kind).code == code for code, kind in pairs)


def test_the_limits_of_the_semantic_guide_are_those_of_the_code() -> None:
    shown = {int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", section(SEMANTIC, "Limits"))}
    known = {
        limits.SEMANTIC_KEY_CHARACTERS,
        limits.SEMANTIC_ID_CHARACTERS,
        limits.SEMANTIC_VALUE_BYTES,
        limits.PLUGIN_VALUE_DEPTH,
        limits.WRITER_CHARACTERS,
        limits.CONSUMER_HINTS,
        limits.SPEC_REF_CHARACTERS,
        limits.LONGEST_TTL_SECONDS,
        limits.BATCH_OPERATIONS,
    }
    assert shown == known | {1, 8}  # from 1; UTF-8


@pytest.mark.parametrize(("document", "heading"), [(GUIDE, "Limits"), (PROTOCOL, "Sizes")], ids=["guide", "protocol"])
def test_limits_are_those_of_the_code(document: Path, heading: str) -> None:
    rows = re.findall(r"^\| [^`|]+ \| [^|]+ \|", section(document, heading), re.MULTILINE)
    shown = {int(number.replace(",", "")) for row in rows for number in re.findall(r"\d[\d,]*", row)}
    known = {
        limits.PLUGIN_NAME_CHARACTERS,
        limits.PLUGIN_KEY_CHARACTERS,
        limits.PLUGIN_VALUE_BYTES,
        limits.PLUGIN_VALUE_DEPTH,
        limits.LONGEST_TTL_SECONDS,
        limits.LISTED_KEYS,
        limits.MOST_LISTED_KEYS,
        limits.OWNER_BYTES // 2**20,
        limits.INTAKE_BYTES // 2**20,
        limits.OWNER_LEASES,
    }
    assert known <= shown
    known |= {limits.OWNER_LEASES, limits.LEASE_KEY_BYTES, int(limits.DEADLINE_SECONDS)}
    assert shown <= known | {0, 1, 8, 9, 68}  # from 1; a-z 0-9; UTF-8; about 68 years


async def test_metrics_are_those_of_the_code() -> None:
    async with BotDatabase(":memory:") as db, PluginUsage(db) as usage:
        await usage.count_all()
        servers = ServerHealth(host="a", timeline=1, synchronous="", hosts=(), failovers=0, unknown_commits=0)
        shown = (await Metrics(Meters(), usage, prefix="rosey", health=lambda: servers).render()).decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", shown, re.MULTILINE))
    listed = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", section(SERVICE, "Metrics"), re.MULTILINE))
    assert listed == kinds
    for name in re.findall(r"rosey_(?:kv|semantic|database|http)_\w+", SERVICE.read_text()):
        assert name in kinds or re.sub("_(bucket|sum|count)$", "", name) in kinds
