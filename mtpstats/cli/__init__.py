"""The command line: the group, and the one place where exceptions become exit codes.

Commands are imported when they are called, so that ``mtpstats --help`` stays fast.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

import click

import mtpstats
from mtpstats.cli import streams
from mtpstats.cli.signals import Watch
from mtpstats.errors import MtpStatsError
from mtpstats.text import printable

COMMANDS = {
    "bench": "Run prompts, and show how the MTP head drafts for them.",
    "record": "Record once what any drafting policy can be replayed from.",
    "report": "Show a result again: as text, Markdown, CSV, JSON, HTML or a picture.",
    "compare": "Compare results of the same prompts with the first one.",
    "merge": "Add up the results of a run that was split by prompts.",
    "import": "Make a result of what a llama-server logged or counted.",
    "replay": "Say from a trace what drafting policies would have done.",
    "plan": "Predict the speed of every drafting policy, and recommend one.",
    "validate": "Run the fastest policies for real, predicted beside measured.",
    "info": "Show the libllama builds, the devices, and how a model can be driven.",
}

MAX_LINE = 2000
COMPLETE = "_MTPSTATS_COMPLETE"

EXAMPLES = """\
Examples:
  mtpstats bench                           the built-in model and prompts
  mtpstats bench -m model.gguf -o a.json   your model; keep the result
  mtpstats report a.json                   the result again
  mtpstats record -m model.gguf -o run.trace
                                           record once ...
  mtpstats replay run.trace                ... what other drafts would have done
  mtpstats plan run.trace                  ... how fast each would be: what to use
  mtpstats validate run.trace              was that so?
  mtpstats info -m model.gguf              can this model draft?
"""


def module(name: str) -> str:
    """Return the name of a command's module; ``import`` is no name for one."""
    return "imports" if name == "import" else name


class _Group(click.Group):
    """Looks commands up in ``COMMANDS`` and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"mtpstats.cli.{module(cmd_name)}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("\n" + EXAMPLES)


@click.group(
    cls=_Group,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(mtpstats.__version__, prog_name="mtpstats", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Measure how the MTP head of a GGUF model drafts: deeper, wider, or leave it."""
    if ctx.invoked_subcommand is None:
        raise click.UsageError("no command given", ctx)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code (DESIGN section 6).

    0 done, 1 failed at run time, 2 bad usage or input, 3 a check did not hold, 130 interrupted.
    A reader that went away (``| head -1``) has what it wanted: 0.
    """
    streams.prepare()
    arguments = list(sys.argv[1:] if args is None else args)
    try:
        if COMPLETE in os.environ:
            return _completed(os.environ[COMPLETE])
        with Watch(), cli.make_context("mtpstats", arguments) as ctx:
            cli.invoke(ctx)
        streams.flush()
    except click.exceptions.Exit as done:
        return done.exit_code
    except BrokenPipeError:
        streams.discard()
        return 0
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "mtpstats"
        return _failed(f"{error.format_message()} (see {path} --help)", 2)
    except MtpStatsError as error:
        return _failed(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    except RecursionError:
        return _failed("the input is nested too deep", 2)
    except MemoryError:
        return _failed("not enough memory", 1)
    except OSError as error:
        streams.discard()
        return _failed(f"{error.filename or 'output'}: {error.strerror or error}", 1)
    except Exception as error:
        kind = type(error).__name__
        return _failed(f"unexpected {kind}: {error} (MTPSTATS_TRACEBACK=1 shows where)", 1)
    return 0


def _completed(instruction: str) -> int:
    """Say to a shell what may follow, or how it is to ask; click's own words."""
    from click.shell_completion import shell_complete

    return shell_complete(cli, {}, "mtpstats", COMPLETE, instruction)


def _failed(message: str, code: int) -> int:
    """Print one plain line and return the exit code; what was printed before comes first."""
    try:
        streams.flush()
    except OSError as error:
        message += f"; standard output: {error.strerror or error}"
    try:
        if os.environ.get("MTPSTATS_TRACEBACK") == "1":
            traceback.print_exc()
        line = printable(" ".join(message.split()))
        if len(line) > MAX_LINE:  # a name of any length may be in it
            line = f"{line[: MAX_LINE // 2]} ... {line[-MAX_LINE // 2 :]}"
        streams.to_stderr(f"mtpstats: error: {line}\n")
    except OSError:
        pass
    streams.discard()
    return code
