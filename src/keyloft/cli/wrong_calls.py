"""Explains a wrong call of a command: what was mistyped, is at the wrong place, or lacks its quotes."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, Final

import typer.core

_NEAR: Final = 0.8
"""How similar a misplaced option must be to one of the command; below that, it is likely to be another mistake."""
_NEGATIVE: Final = re.compile(r"^-[0-9.].*", re.DOTALL)
_OTHER_NAMES: Final = {"--ttl": "--expire-in", "--expire-in": "--ttl"}
"""Options for plugins by their names elsewhere, and the other way round."""


class Command(typer.core.TyperCommand):
    """A command whose arguments may be negative numbers, which resemble options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _suggestion(), self._explanation(ctx):
            self.make_parser(ctx).parse_args([_NEGATIVE.sub("0", arg) for arg in args])
            # All options are known, so what resembles an unknown one is a number.
            ctx.ignore_unknown_options = True
            return super().parse_args(ctx, args)

    @contextmanager
    def _explanation(self, ctx: Any) -> Iterator[None]:
        """Say that an option has another name here or is an argument, and that a value with spaces needs quotes."""
        try:
            yield
        except Exception as raised:
            error: Any = raised
            option = getattr(error, "option_name", "")
            options = {name for parameter in self.params for name in parameter.opts if name.startswith("-")}
            arguments = [
                str(parameter.metavar) for parameter in self.params if not options.intersection(parameter.opts)
            ]
            explained = None
            if (here := _OTHER_NAMES.get(option)) in options:
                explained = f"No such option: {option}. Did you mean {here}?"
            elif (argument := option.lstrip("-").upper()) in arguments:
                explained = (
                    f"No such option: {option}. {argument} stands alone: {' '.join([ctx.command_path, *arguments])}"
                )
            elif "unexpected extra arg" in getattr(error, "message", "") and "VALUE" in arguments:
                explained = (
                    f'{error.message}. A VALUE with spaces needs quotes around it, as in \'{{"name": "Alice"}}\''
                )
            elif "unexpected extra arg" in getattr(error, "message", "") and "--database" in options:
                explained = f"{error.message}. If that is a database, name it by --database"
            if explained is not None:
                error.message, error.possibilities = explained, None
            raise


class Group(typer.core.TyperGroup):
    """A group of commands that suggests a command for a mistyped name, and the right place for an option before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        try:
            with _suggestion():
                return super().parse_args(ctx, args)
        except Exception as raised:
            error: Any = raised
            option = getattr(error, "option_name", "")
            if "Did you mean" not in str(error) and (meant := self._meant_behind(given, option)):
                error.message = f"No such option: {option}. Options follow the command: {ctx.command_path} {meant} …"
                error.possibilities = None
            raise

    def _meant_behind(self, args: list[str], option: str) -> str | None:
        """What the caller probably meant, if a command of this group has such an option; None if none has."""
        named = next((arg for arg in args if arg in self.commands), None)
        commands = self.commands.values() if named is None else [self.commands[named]]
        options = {name for command in commands for parameter in command.params for name in parameter.opts}
        near = get_close_matches(option, [name for name in options if name.startswith("--")], 1, _NEAR)
        if near:
            return f"{named or 'COMMAND'} {near[0]}"
        return self._meant_behind([], option) if named else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            with _suggestion(args[0], self.commands):
                return super().resolve_command(ctx, args)
        except Exception as raised:
            error: Any = raised
            behind = next((arg for arg in args[1:] if arg in self.commands), None)
            if "Did you mean" not in str(error) and behind is not None:
                error.message = f"{error.message.rstrip('.')}. The command comes first: {ctx.command_path} {behind} …"
            raise


@contextmanager
def _suggestion(mistyped: str = "", known: Iterable[str] = ()) -> Iterator[None]:
    """Add what was meant to a usage error, in the same words with every version of Typer."""
    try:
        yield
    except Exception as raised:
        error: Any = raised
        options = getattr(error, "possibilities", None) or ()
        if near := get_close_matches(mistyped or getattr(error, "option_name", ""), [*known, *options], 1):
            error.message = f"{error.message.partition(' Did you mean')[0].rstrip('.')}. Did you mean {near[0]}?"
            error.possibilities = None
        raise
