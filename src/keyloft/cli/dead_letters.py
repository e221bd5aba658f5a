"""`keyloft semantic dead-letters …`: writes that were given up."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, TypeAlias

from keyloft.cli.options import Commands, Output, Yes, argument, option
from keyloft.cli.semantic import ProjectArgument, expected, shown
from keyloft.cli.semantic_access import OpenedState, SemanticAccess
from keyloft.cli.terminal import Columns, confirm, fail, remark, say
from keyloft.semantic import DeadLetter, Envelope
from keyloft.semantic.keys import path_of

LetterId: TypeAlias = Annotated[str, argument("ID", "As `dead-letters list` shows it.")]


def list_(project: ProjectArgument, *, out: Output, store: SemanticAccess) -> None:
    """Print the dead letters of a project, the oldest first. Values are left out.

    Example: keyloft semantic dead-letters list tenant/acme/project/web
    """
    columns: Columns[DeadLetter] = {
        "id": lambda letter: letter.id,
        "when": lambda letter: letter.at,
        "why": lambda letter: letter.error_code,
        "attempts": lambda letter: letter.attempts,
        "what": lambda letter: "\n".join([intent.action for intent in letter.operations]),
        "path": lambda letter: "\n".join([path_of(intent.key) for intent in letter.operations]),
    }
    nothing = f"there are no dead letters in {project}"
    store.with_semantic(
        project,
        lambda opened: out.show_all(opened.dead_letters.list(project), _shown, columns, nothing),
        argument="project",
    )


def retry(
    project: ProjectArgument,
    letter: LetterId,
    *,
    expected_version: Annotated[str | None, option("VERSION", "Replaces what it expected; * for any, or none.")] = None,
    out: Output,
    store: SemanticAccess,
) -> None:
    """Try again what was given up. Once it is written, the dead letter is removed.

    Example: keyloft semantic dead-letters retry tenant/acme/project/web ID
    """
    version = None if expected_version is None else expected(expected_version)

    async def work(opened: OpenedState) -> Sequence[Envelope | None]:
        return await opened.dead_letters.retry(await _find(opened, project, letter), expected_version=version)

    for entry in store.with_semantic(project, work, argument="project"):
        out.show(None if entry is None else shown(entry))


def drop(project: ProjectArgument, letter: LetterId, *, yes: Yes = False, out: Output, store: SemanticAccess) -> None:
    """Remove a dead letter: what it holds is never written. With --json, prints true.

    Example: keyloft semantic dead-letters drop tenant/acme/project/web ID --yes
    """
    if not yes:
        confirm(f"Remove the dead letter {letter}? What it holds is lost then.")

    async def work(opened: OpenedState) -> bool:
        return await opened.dead_letters.drop(await _find(opened, project, letter))

    if not store.with_semantic(project, work, argument="project"):
        fail(f"there is no dead letter {letter} in {project}")
    if out.as_json:
        say("true")
    else:
        remark(f"{letter} is dropped")


def _shown(letter: DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "at": letter.at.isoformat(timespec="milliseconds"),
        "error_code": letter.error_code,
        "error": letter.error,
        "attempts": letter.attempts,
        "requestId": letter.request_id,
        "operations": [
            {"action": one.action, "key": one.key, "expectedVersion": one.expected_version, "lastWriter": one.writer}
            for one in letter.operations
        ],
    }


async def _find(opened: OpenedState, project: str, name: str) -> DeadLetter:
    found = [letter for letter in await opened.dead_letters.list(project) if letter.id == name]
    return found[0] if found else fail(f"there is no dead letter {name} in {project}")


COMMANDS: Final[Commands] = (list_, retry, drop)
