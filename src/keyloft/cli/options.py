"""Options that several commands have: the settings of the service, which database, and the form of the output."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Final, TypeAlias

import typer
import typer.core

from keyloft.cli.terminal import ended

AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON, also at a terminal.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
AsText: TypeAlias = Annotated[bool, typer.Option("--text", help="VALUE is text, whatever it begins with.")]
Value: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="VALUE", help="JSON, as in 100 or '{\"a\": 1}'; what does not begin like JSON is text. - reads it."
    ),
]


def add_commands(
    group: typer.Typer, settings: Iterable[str] | None, commands: Mapping[str, Callable[..., int | None]]
) -> None:
    """Add commands by their names, with flags for settings; None for commands that take no settings."""
    for name, command in commands.items():
        group.command(name, cls=Command)(ended(command if settings is None else with_settings(*settings)(command)))


class Command(typer.core.TyperCommand):
    """A command whose arguments may be negative numbers, which resemble options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.ignore_unknown_options = any([_NEGATIVE.match(arg) for arg in args])
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            _suggest(error, getattr(error, "possibilities", None))
            raise


class Group(typer.core.TyperGroup):
    """A group of commands that suggests one for a mistyped name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            _suggest(error, get_close_matches(args[0], self.commands))
            raise


def _suggest(error: Any, names: list[str] | None) -> None:
    """Add to a usage error what was meant, in the same words whichever version of Typer raised it."""
    if names and "Did you mean" not in error.message:
        error.message = f"{error.message.rstrip('.')}. Did you mean {' or '.join(names)}?"
    error.possibilities = None


_NEGATIVE: Final = re.compile(r"-[0-9.]")


def with_settings(*names: str) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Give a command flags for settings; it is called with `flags`, as `config.load` takes them."""

    def give(command: Callable[..., int | None]) -> Callable[..., int | None]:
        wanted = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in wanted.parameters.values() if parameter.name != "flags"]
        flags = list(_flags(names))

        def run(**given: Any) -> int | None:
            settings = {flag.name: given.pop(flag.name) for flag in flags}
            return command(**given, flags=settings)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *flags)}
        return run

    return give


def _flags(names: Iterable[str]) -> Iterable[inspect.Parameter]:
    from keyloft.server.config import SETTINGS

    file = typer.Option("--config", metavar="FILE", help="A TOML file with settings. [KEYLOFT_CONFIG; default: none]")
    yield _flag("config", file)
    for name in names:
        setting = SETTINGS[name]
        known = setting.default_text or "none"
        yield _flag(
            name,
            typer.Option(
                setting.flag,
                metavar="|".join(setting.choices) or setting.metavar,
                help=f"{setting.description} [{setting.environment}; default: {known}]",
                show_default=False,
            ),
        )


def _flag(name: str, option: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=None, annotation=Annotated[str | None, option])
