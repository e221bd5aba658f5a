"""Options that several commands have: the settings of the service, the form of the output, and whether to ask.

A command may have a parameter whose type is a subclass of `Options`: it stands for all fields of that class.

    def count(prefix: TuplePrefixArgument = "", *, section: Section, out: Output, database: NamedDatabase) -> None:

The command `count` thus has the options --start, --end, --json, --config and --database.
"""

import inspect
import re
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

import typer
from msgspec import Struct

from keyloft.cli.terminal import Columns, is_for_people, say, show_laid_out, table, to_json
from keyloft.server.config import SETTINGS, Config, FlagValues, load

T = TypeVar("T")
Commands: TypeAlias = tuple[Callable[..., int | None], ...]
"""Functions with the names of their commands, as in `nats_config` or `import_`. They return an exit code; None is 0."""


def argument(metavar: str, explained: str) -> Any:
    """An argument of a command, to be annotated with."""
    return typer.Argument(metavar=metavar, help=explained)


def option(metavar: str, explained: str, *names: str) -> Any:
    """An option that takes a value; its name is that of the parameter, unless there are `names`."""
    return typer.Option(*names, metavar=metavar, help=explained)


def _whole(what: str) -> Callable[[str | int], int]:
    """A parser of whole numbers, whose message is the same with every version of Typer."""

    def whole(given: str | int) -> int:
        # Typer passes defaults, too.
        if re.fullmatch(r"[+-]?[0-9]{1,100}", str(given), re.ASCII) is None:
            raise typer.BadParameter(f"expected {what}")
        return int(given)

    return whole


_whole_number = _whole("a whole number, as in 10")


def number_argument(metavar: str, explained: str) -> Any:
    """An argument of a command that is a whole number."""
    return typer.Argument(metavar=metavar, help=explained, parser=_whole_number)


def number_option(metavar: str, explained: str) -> Any:
    """An option that takes a whole number."""
    return typer.Option(metavar=metavar, help=explained, parser=_whole_number)


def flag(name: str, explained: str) -> Any:
    """An option that is given or not."""
    return typer.Option(name, help=explained)


Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]
AsText: TypeAlias = Annotated[bool, flag("--text", "VALUE is text, whatever it begins with.")]
Value: TypeAlias = Annotated[
    str,
    argument("VALUE", "JSON, as in 100 or '{\"a\": 1}'; else it is text. - is the standard input."),
]
Limit: TypeAlias = Annotated[int | None, number_option("N", "How many to show at most.")]


def _seconds(given: str | float) -> float:
    try:
        return float(given)
    except ValueError:
        raise typer.BadParameter("expected a number of seconds, as in 3600 or 0.5") from None


def seconds_option(explained: str, default: float | None = None) -> Any:
    """An option that takes seconds, also parts of one."""
    shown = explained if default is None else f"{explained} [default: {default:g}]"  # Typer would show 3600.0
    return typer.Option(metavar="SECONDS", help=shown, parser=_seconds, show_default=False)


def ttl_option(explained: str) -> Any:
    """An option that takes a TTL."""
    return typer.Option(metavar="SECONDS", help=explained, parser=_whole("a whole number of seconds, as in 1800"))


Ttl: TypeAlias = Annotated[int | None, ttl_option("The entry expires after this many seconds.")]


class Options(Struct, frozen=True, kw_only=True):
    """Options that several commands share: its fields are declared as parameters of a command are."""


class Order(Options, frozen=True, kw_only=True):
    """How much of a list is shown, and in which order."""

    limit: Limit = None
    reverse: Annotated[bool, flag("--reverse", "The last one first.")] = False


class Settings(Options, frozen=True, kw_only=True):
    """Settings of the service that a command needs: a flag for each of `names`, and --config."""

    names: ClassVar[tuple[str, ...]]
    flags: FlagValues

    def config(self) -> Config:
        """Read the settings from their flags, the environment and the file of --config.

        Raises:
            InvalidArgument: The file can't be read, or a setting is wrong.
        """
        return load(self.flags, only=self.names)


class Output(Options, frozen=True, kw_only=True):
    """The form of a result: laid out for people at a terminal; JSON in a pipe, or with --json."""

    as_json: Annotated[bool, flag("--json", "Print JSON, also at a terminal.")] = False

    @property
    def is_for_people(self) -> bool:
        return not self.as_json and is_for_people()

    def show(self, value: object) -> None:
        """Print a value: laid out and coloured at a terminal, in one line otherwise."""
        if self.is_for_people:
            show_laid_out(value)
        else:
            say(to_json(value))

    def show_report(self, report: object, sentence: str) -> None:
        """Print a sentence at a terminal, and the report as JSON elsewhere."""
        say(sentence if self.is_for_people else to_json(report))

    async def say_all(self, lines: AsyncIterable[str], nothing: str) -> None:
        """Print lines as they arrive; at a terminal, the sentence `nothing` if there are none."""
        are_some = False
        async for line in lines:
            say(line)
            are_some = True
        if not are_some and self.is_for_people:
            say(nothing)

    async def show_all(
        self, found: AsyncIterable[T], fields: Callable[[T], object], columns: Columns[T], nothing: str
    ) -> None:
        """Print many things: as a table at a terminal, or as JSON, one per line as they arrive."""
        if self.is_for_people:
            table(columns, [[column(one) for column in columns.values()] async for one in found], nothing)
            return
        await self.say_all((to_json(fields(one)) async for one in found), nothing)


def parameters(command: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """The parameters of a command; an `Options` parameter is replaced by its fields."""
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if _is_options(parameter):
            yield from parameters(parameter.annotation)
        elif parameter.annotation == FlagValues:
            yield from _flags(command.names)  # type: ignore[attr-defined]
        else:
            yield parameter


def as_typed(message: str, declared: Iterable[inspect.Parameter]) -> str:
    """A message whose leading argument name is replaced by what the user typed: --limit, VALUE."""
    # As in `semantics.ttl_seconds: …`, which is --ttl; `keyloft plugin` begins with the code of the error.
    found = re.match(r"([A-Z_]+: )?(?:semantics\.)?(([a-z]+)\w*)(?=[:\[])", message)
    found = found or re.match(r"([A-Z_]+: )?((plugin)_name|plugin|key)(?= must )", message)
    found = found or re.match(r"([A-Z_]+: )(expected_version|by)(?= must )", message)
    if found is None:
        return message
    named = {parameter.name: parameter for parameter in declared}
    for candidate in found.groups()[1:]:  # the whole name first: leaf_name is not --leaf
        if parameter := named.get(candidate):
            [info] = parameter.annotation.__metadata__
            name = info.metavar
            if not isinstance(info, typer.models.ArgumentInfo):
                # Typer takes the first name of an option for its default, until it builds the command.
                names = [info.default, *(info.param_decls or ()), f"--{parameter.name.replace('_', '-')}"]
                name = next(name for name in names if isinstance(name, str))
            without = "--never is" if "never" in named else "leave it out"
            rule = message[found.end() :].replace("None is for an entry", f"{without} for an entry")
            return f"{found[1] or ''}{name}{rule}"
    return message


def call(command: Callable[..., T], given: Mapping[str, Any]) -> T:
    """Call a command with what was given for its `parameters`."""
    arguments = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if _is_options(parameter):
            arguments[parameter.name] = call(parameter.annotation, given)
        elif parameter.annotation == FlagValues:
            arguments[parameter.name] = {name: given[name] for name in ("config", *command.names)}  # type: ignore[attr-defined]
        else:
            arguments[parameter.name] = given[parameter.name]
    return command(**arguments)


def _is_options(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.annotation, type) and issubclass(parameter.annotation, Options)


def _flags(names: tuple[str, ...]) -> Iterator[inspect.Parameter]:
    shown = {"config": option("FILE", "A TOML file with settings. [KEYLOFT_CONFIG; default: none]", "--config")}
    for name in names:
        setting = SETTINGS[name]
        metavar = "|".join(setting.choices) or setting.metavar
        known = f"{setting.environment}; default: {setting.default_text or 'none'}"
        shown[name] = option(metavar, f"{setting.description} [{known}]", setting.flag)
    for name, declared in shown.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(name, kind, default=None, annotation=Annotated[str | None, declared])
