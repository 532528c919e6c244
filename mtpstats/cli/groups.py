"""Options as fields of dataclasses: how they are declared, given to a command, and listed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import field, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from mtpstats.cli import values
from mtpstats.errors import InputError

Function = TypeVar("Function", bound=Callable[..., Any])


class GroupedOption(click.Option):
    """A click option that knows under which heading the help lists it."""

    def __init__(self, *args: Any, heading: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heading = heading


class Command(click.Command):
    """A command whose help lists options by heading and keeps the epilog's line breaks.

    It never writes over a file that it reads, nor two things into one.
    """

    def invoke(self, ctx: click.Context) -> Any:
        """Look at all the files together, then run."""
        read: list[Path] = []
        written: list[Path] = []
        for param in self.get_params(ctx):
            given = ctx.params.get(param.name or "")
            if isinstance(param.type, values.File) and given is not None:
                paths = given if isinstance(given, tuple) else (given,)
                (written if param.type.written else read).extend(paths)
        taken = {_real(path) for path in read}
        for path in written:
            real = _real(path)
            if real in taken and (os.path.isfile(real) or not os.path.exists(real)):
                raise InputError(f"{path}: this command uses that file already; write to another")
            taken.add(real)
        return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section per heading, in the order of declaration; ``--help`` comes last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and not isinstance(param, click.Argument):
                heading = getattr(param, "heading", "Other")
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records, col_max=26)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples as they stand."""
        if self.epilog:
            formatter.write("\n")
            for line in self.epilog.strip("\n").splitlines():
                formatter.write(line + "\n")


def _real(path: Path) -> str:
    try:
        return os.path.realpath(path)
    except OSError as error:  # the current directory was removed
        raise InputError(f"{path}: cannot be found from here: {error.strerror}") from None


def option(*names: str, **settings: Any) -> Any:
    """Declare a dataclass field that is filled from the command line."""
    return field(metadata={"names": names, "settings": settings})


def file_argument(name: str, **settings: Any) -> Callable[[Function], Function]:
    """Give a command a file name, or several with ``nargs=-1``, as its argument."""
    return click.argument(name, type=values.file(), **settings)


def takes(**groups: type) -> Callable[[Function], Callable[..., Any]]:
    """Give a command the options of ``groups``; it receives one filled dataclass per keyword.

    ``@takes(model=ModelOptions)`` over ``def info(model: ModelOptions)`` adds every option of
    ``ModelOptions``, in the order of its fields, under the heading ``ModelOptions.HEADING``.
    """

    def decorate(function: Function) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(**given: Any) -> Any:
            filled = {
                name: group(**{f.name: given.pop(f.name) for f in fields(group)})
                for name, group in groups.items()
            }
            return function(**filled, **given)

        decorated: Callable[..., Any] = call
        for group in reversed(groups.values()):
            for item in reversed(fields(group)):
                add = click.option(
                    *item.metadata["names"],
                    item.name,
                    cls=GroupedOption,
                    heading=group.HEADING,  # type: ignore[attr-defined]
                    **item.metadata["settings"],
                )
                decorated = add(decorated)
        return decorated

    return decorate
