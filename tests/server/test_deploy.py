"""The operators' files in deploy/: what they name exists in the real service."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import pytest
import yaml  # type: ignore[import-untyped]

import keyloft
from keyloft.nats.errors import WIRE_ERRORS
from keyloft.plugins import DatabaseClient
from keyloft.semantic import SemanticClient, Semantics
from keyloft.server.config import SETTINGS
from tests.server.test_serve import serving
from tests.support.postgres_cluster import cluster
from tools.postgres import TIMEOUT_SECONDS
from tools.process_family import until

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
RULES: Final = DEPLOY / "prometheus-rules.yaml"
TWO_PRIMARIES: Final = "KeyloftTwoPrimaries"
"""The alert about metrics that only a service on PostgreSQL has."""
Samples: TypeAlias = dict[str, set[str]]
"""The labels of each metric."""

# What Prometheus itself adds to a scrape.
TARGET_LABELS: Final = {"job", "instance"}
WORDS: Final = {"sum", "max", "by", "rate", "increase", "histogram_quantile", "label_values"}
TOKEN: Final = re.compile(
    r"""\s+ | (?P<text>"[^"]*") | (?P<range>\[(?:\d+[smhd]|\$__rate_interval)\]) | (?P<number>\d+(?:\.\d+)?)
    | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*) | (?P<sign>[-+*/(),{}]|=~|!~|!=|==|=|>=|<=|>|<)""",
    re.VERBOSE,
)


def tokens(expression: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(expression):
        found = TOKEN.match(expression, at)
        assert found is not None, f"not PromQL as this test reads it: {expression[at:]!r}"
        at = found.end()
        if found.lastgroup is not None:
            yield found.lastgroup, found[0]


def used(expression: str) -> tuple[set[str], set[str], list[tuple[str, str]]]:
    """The metrics of an expression, its labels, and the texts that labels are compared with."""
    metrics: set[str] = set()
    labels: set[str] = set()
    compared: list[tuple[str, str]] = []
    inside, previous, label = "", "", ""
    for kind, token in tokens(expression):
        if token == "{" or (token == "(" and previous == "by"):
            inside = token
        elif token in "})" and inside:
            inside = ""
        elif kind == "name" and inside:
            labels.add(token)
            label = token
        elif kind == "text":
            compared.append((label, token.strip('"')))
        elif kind == "name" and token not in WORDS:
            metrics.add(token)
        previous = token
    assert metrics, f"{expression} names no metric"
    return metrics, labels, compared


def check(expression: str, shown: str, samples: Samples) -> None:
    """Check an expression, and the labels that a text about its result shows."""
    metrics, labels, compared = used(expression)
    assert metrics <= samples.keys(), f"{expression}: there is no {metrics - samples.keys()}"
    for metric in metrics:
        assert labels <= samples[metric], f"{expression}: {metric} has no label {labels - samples[metric]}"
    for label, text in compared:
        if label == "error_code":
            assert set(text.split("|")) <= WIRE_ERRORS.keys()
    # A sum or maximum has the labels after «by» alone.
    kept = [re.split(r"\s*,\s*", group) for group in re.findall(r"\bby \(([^)]*)\)", expression)]
    result = {label for group in kept for label in group} if kept else set().union(*[samples[name] for name in metrics])
    for label in re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", shown):
        assert label in result, f"{shown!r}: the result of {expression} has no label {label}"


@pytest.fixture(scope="module")
def samples() -> Samples:
    """What /metrics shows after some requests; filled by the first test that needs it."""
    return {}


@pytest.fixture
async def scraped(samples: Samples, tmp_path: Path) -> Samples:
    if samples:
        return samples
    async with serving(tmp_path, "--nats-port", "0", "--cleanup-every", "0.1") as served:
        async with await DatabaseClient.connect(served.nats, plugin_name="trivia") as client:
            await client.kv.set("k", 1)
            await client.kv.get("k")
            await client.kv.list()
            await client.kv.delete("k")
            await client.kv.set("k", 1)
            with pytest.raises(keyloft.InvalidArgument):
                await client.request("get", {"key": ""})
        async with await SemanticClient.connect(served.nats, tenant="acme", project="web") as workflow:
            await workflow.put("a", 1, expected_version=0, writer="w:1", semantics=Semantics("config"))
        text = await served.metrics()
    samples |= samples_in(text)
    samples["up"] = set(TARGET_LABELS)
    return samples


def samples_in(text: str) -> Samples:
    """The metrics of a scrape, with their labels."""
    found: Samples = {}
    for name, labels in re.findall(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        found.setdefault(name, set(TARGET_LABELS)).update(re.findall(r'(\w+)="', labels))
    return found


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load(RULES.read_text())["groups"]
    assert group["name"] == "keyloft"
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_the_reader_of_expressions_is_strict() -> None:
    text = 'sum by (le) (rate(a_bucket{plugin=~"$plugin"}[5m])) / sum(rate(b_total[$__rate_interval])) > 0.5'
    assert used(text) == ({"a_bucket", "b_total"}, {"le", "plugin"}, [("plugin", "$plugin")])
    for wrong in ("rate(a_total[5x])", "a_total # b", "sum(1)"):
        with pytest.raises(AssertionError):
            used(wrong)
    with pytest.raises(AssertionError, match="there is no"):
        check("gone_total", "", {"a_total": set()})
    with pytest.raises(AssertionError, match="has no label"):
        check('a_total{gone="x"}', "", {"a_total": {"plugin"}})
    with pytest.raises(AssertionError, match="has no label"):
        check("sum by (plugin) (a_total)", "{{error_code}}", {"a_total": {"plugin", "error_code"}})


async def test_the_dashboard_shows_metrics_that_exist(scraped: Samples) -> None:
    dashboard = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    assert dashboard["uid"] == "keyloft"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    shown: set[str] = set()
    for panel in panels:
        assert panel["type"] in ("timeseries", "stat")
        assert {"h", "w", "x", "y"} == panel["gridPos"].keys()
        for target in panel["targets"]:
            check(target["expr"], target["legendFormat"], scraped)
            shown |= used(target["expr"])[0]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            assert label in scraped[metric]
    exist = {re.sub(r"_(bucket|sum|count)$", "", name) for name in scraped} - {"up"}
    exist = {name for name in exist if not name.endswith("_created")}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown} == exist, "every metric has a panel"


async def test_the_alerts_are_about_metrics_that_exist(scraped: Samples) -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        if rule["alert"] != TWO_PRIMARIES:
            for text in rule["annotations"].values():
                check(rule["expr"], text, scraped)
    if promtool := shutil.which("promtool"):
        checked = await asyncio.create_subprocess_exec(promtool, "check", "rules", str(RULES))
        assert await checked.wait() == 0


@pytest.mark.slow
@pytest.mark.blocks_the_loop
async def test_an_alert_is_raised_while_two_hosts_can_be_written(tmp_path: Path) -> None:
    [rule] = [rule for rule in rules() if rule["alert"] == TWO_PRIMARIES]
    found = re.fullmatch(r"sum by \(instance\) \((\w+)\{(.*)\}\) > 1", rule["expr"])
    assert found is not None
    metric, labels = found.groups()
    counted = re.compile(rf"^{metric}\{{[^}}]*{labels}[^}}]*\}} 1$", re.MULTILINE)
    with cluster() as servers:
        old, new = servers.nodes
        async with serving(tmp_path, "--nats-port", "0", "--database", servers.url()) as served:
            text = await served.shows("/metrics", 200)
            for shown in rule["annotations"].values():
                check(rule["expr"], shown, samples_in(text))
            assert len(counted.findall(text)) == 1
            until(lambda: new.caught_up_with(old))
            new.promote()
            async with asyncio.timeout(TIMEOUT_SECONDS):
                while len(counted.findall(await served.shows("/metrics", 200))) != 2:
                    await asyncio.sleep(0.05)


def unit() -> dict[str, list[tuple[str, str]]]:
    """The sections of the systemd unit, each with its settings; one may be there several times."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for line in (DEPLOY / "keyloft.service").read_text().splitlines():
        if found := re.fullmatch(r"\[(\w+)\]", line):
            settings: list[tuple[str, str]] = sections.setdefault(found[1], [])
        elif line and not line.startswith("#"):
            name, equals, value = line.partition("=")
            assert (equals, name.isalpha()) == ("=", True), line
            settings.append((name, value))
    return sections


def test_the_unit_runs_the_service_with_few_rights(tmp_path: Path) -> None:
    sections = unit()
    assert list(sections) == ["Unit", "Service", "Install"]
    service = dict(sections["Service"])
    assert service["ExecStart"].endswith("/keyloft serve")
    assert service["EnvironmentFile"] == "/etc/keyloft.env"
    assert (service["User"], service["ProtectSystem"], service["UMask"]) == ("keyloft", "strict", "0077")
    assert (service["CapabilityBoundingSet"], service["NoNewPrivileges"]) == ("", "yes")
    if analyze := shutil.which("systemd-analyze"):
        text = (DEPLOY / "keyloft.service").read_text().replace(service["ExecStart"], "/bin/true")
        copy = tmp_path / "keyloft.service"
        copy.write_text(text)
        done = subprocess.run([analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
        assert "keyloft.service" not in done.stderr, done.stderr


def test_the_environment_file_sets_known_settings() -> None:
    known: dict[str, Any] = {setting.environment: setting for setting in SETTINGS.values()}
    lines = [line.removeprefix("#") for line in (DEPLOY / "keyloft.env").read_text().splitlines()]
    variables = [line.partition("=") for line in lines if re.match(r"[A-Z_]+=", line)]
    assert len(variables) > 5
    for name, _, value in variables:
        if value:
            known[name].read(value, name, is_text=True)
        assert name in known
