"""The command `doctor`: tries what often goes wrong, and says what to do about it."""

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Final

from keyloft import limits
from keyloft.admin import Finding
from keyloft.cli.database import run_quietly
from keyloft.cli.doctor.checks import STORE_ID, bounded, ok, problem, skipped, warning
from keyloft.cli.findings import show_findings
from keyloft.cli.nats_config import read_logins
from keyloft.cli.options import Commands, Output, Settings, option
from keyloft.cli.terminal import counted, is_for_people, say, to_json
from keyloft.errors import InvalidArgument
from keyloft.plugins import rules
from keyloft.server.config import HTTP_SETTINGS, NATS_SETTINGS, VARIABLES, Config, check_service
from keyloft.server.environment import mistyped_variables


class ExaminedSettings(Settings, frozen=True, kw_only=True):
    """Where a service would keep its data, and where it would listen."""

    names = ("database", *NATS_SETTINGS, "nats_port", "prefixes", "semantic_prefix", *HTTP_SETTINGS)


def doctor(
    *,
    plugin: Annotated[str | None, option("NAME", "The plugin of the login, if its user name is another.")] = None,
    nats_config: Annotated[str | None, option("FILE", "What `keyloft nats-config` wrote: its users are tried.")] = None,
    out: Output,
    settings: ExaminedSettings,
) -> int:
    """Find why something does not work, and what to do about it.

    Tries the settings, the database, the disk, NATS and its permissions, the ports and HTTP. Changes nothing. Each
    finding says what to do; exit code 1 if there is a problem, warnings don't count.

    Example: keyloft doctor --database app.db
    """
    if plugin is not None:
        rules.plugin_name(plugin)
    logins = {} if nats_config is None else read_logins(nats_config, "--nats-config")
    if nats_config is not None and not logins:
        raise InvalidArgument(f"--nats-config: {nats_config} has no users such as `keyloft nats-config` writes them")
    # Findings say what matters. When a check is given up, drivers log errors that would only distract.
    logging.getLogger("asyncio").addHandler(logging.NullHandler())
    found: list[Finding] = []

    async def work() -> None:
        async for some in _examined(settings, plugin, logins):
            found.extend(some)
            if not out.as_json:
                show_findings(some)

    run_quietly(work())
    if out.as_json:
        say(to_json(tuple(found)))
    elif is_for_people():
        say(f"\n{_number(found, 'problem')}, {_number(found, 'warning')}")
    return 1 if any(finding.severity == "problem" for finding in found) else 0


def _number(findings: Sequence[Finding], severity: str) -> str:
    number = sum(finding.severity == severity for finding in findings)
    return counted(number, severity) if number else f"no {severity}s"


async def _examined(
    settings: ExaminedSettings, plugin: str | None, logins: Mapping[str, str]
) -> AsyncIterator[Sequence[Finding]]:
    from keyloft.cli.doctor import database, host

    yield host.versions()
    try:
        config = settings.config()
    except InvalidArgument as error:
        yield [problem("settings", str(error), cure="correct it; `keyloft serve --help` explains each")]
        return
    yield [_contradictions(config), *_mistyped()]
    yield host.packages(config)
    of_database = await bounded("database", database.examine(config.database), limits.DOCTOR_CHECK_SECONDS)
    yield of_database
    store = next((one.what.removeprefix(STORE_ID) for one in of_database if one.code == "store"), None)
    yield await bounded("disk", database.disk(config.database), limits.DOCTOR_CHECK_SECONDS)
    found = await bounded("nats", _of_nats(config, plugin, logins), limits.DOCTOR_NATS_SECONDS)
    yield found
    is_served = any(finding.code == "service" and finding.severity == "ok" for finding in found)
    of_ports = host.ports(config, is_served=is_served, store=store)
    yield await bounded("ports", of_ports, limits.DOCTOR_CHECK_SECONDS)
    yield await bounded("http", _of_http(config), limits.DOCTOR_CHECK_SECONDS)


async def _of_nats(config: Config, plugin: str | None, logins: Mapping[str, str]) -> Sequence[Finding]:
    try:
        from keyloft.cli.doctor import nats  # which needs the extra, unlike the other checks
    except ModuleNotFoundError as error:
        return [skipped("nats", f"{str(error.name).partition('.')[0]} is not installed")]
    return await nats.examine(config, plugin, logins)


async def _of_http(config: Config) -> Sequence[Finding]:
    try:
        from keyloft.cli.doctor import http  # which needs the extra, unlike the other checks
    except ModuleNotFoundError as error:
        return [skipped("http", f"{str(error.name).partition('.')[0]} is not installed")]
    return await http.examine(config)


def _mistyped() -> list[Finding]:
    return [
        warning("settings", f"the environment variable {name} is ignored", cure=f"did you mean {meant}?")
        for name, meant in mistyped_variables(VARIABLES)
    ]


def _contradictions(config: Config) -> Finding:
    try:
        check_service(config)
    except InvalidArgument as error:
        return problem("settings", f"`keyloft serve` refuses them: {error}", cure="name the NATS server, too")
    return ok("settings", "they can be read, and don't contradict each other")


COMMANDS: Final[Commands] = (doctor,)
