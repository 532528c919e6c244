"""Writes docs/cli.md from the command line's own definitions.

python docs/make_cli.py          write it
python docs/make_cli.py --check  exit code 1 if it is not up to date
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path

import click

from mtpstats import cli

PAGE = Path(__file__).with_name("cli.md")

HEAD = """\
# Command line

<!-- made by docs/make_cli.py; change the code, not this page -->

`mtpstats COMMAND --help` says the same in the terminal. Options that llama.cpp has carry its names,
meanings and, unless the text says why not, its defaults.

| command | does |
| --- | --- |
"""

TAIL = """\
## Exit codes

| code | means |
| --- | --- |
| 0 | done |
| 1 | something failed at run time |
| 2 | bad usage or bad input |
| 3 | a check that was asked for did not hold (`--fail-if-worse`) |
| 130 | interrupted by Ctrl-C, SIGTERM or SIGHUP; what was finished is kept |

An error is one line on standard error. `MTPSTATS_TRACEBACK=1` adds where it came from.

## Shell completion

For bash (4.4 or later) in `~/.bashrc`, zsh in `~/.zshrc`, fish in
`~/.config/fish/completions/mtpstats.fish`:

```
eval "$(_MTPSTATS_COMPLETE=bash_source mtpstats)"
eval "$(_MTPSTATS_COMPLETE=zsh_source mtpstats)"
_MTPSTATS_COMPLETE=fish_source mtpstats | source
```

Commands, options, their choices and file names are completed. The output may be kept in a file
instead, which spares starting mtpstats with each shell.
"""


def escaped(text: str) -> str:
    """Return text for a table's cell."""
    for character in "\\|*<":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())


def option_row(option: click.Option) -> str:
    """Return an option's row."""
    names = ", ".join(f"`{name}`" for name in option.opts)
    if option.secondary_opts:
        names += " / " + ", ".join(f"`{name}`" for name in option.secondary_opts)
    value = ""
    if option.metavar and not option.is_flag:
        value = f" {escaped(option.metavar)}"
    elif isinstance(option.type, click.Choice):
        value = " " + escaped("|".join(option.type.choices))
    words = option.help or ""
    if option.show_default and not option.is_flag:
        words += f" [default: {option.default}]"
    return f"| {names}{value} | {escaped(words)} |"


def section(name: str) -> str:
    """Return a command's section."""
    command = import_module(f"mtpstats.cli.{cli.module(name)}").command
    arguments = [p for p in command.params if isinstance(p, click.Argument)]
    usage = " ".join(
        ["mtpstats", name, "[OPTIONS]"]
        + [(p.name or "").upper() + ("..." if p.nargs == -1 else "") for p in arguments]
    )
    parts = [f"## mtpstats {name}\n", f"```\n{usage}\n```\n", inspect.cleandoc(command.help) + "\n"]
    headings: dict[str, list[click.Option]] = {}
    for param in command.params:
        if isinstance(param, click.Option):
            headings.setdefault(getattr(param, "heading", "Options"), []).append(param)
    for heading, options in headings.items():
        rows = "\n".join(map(option_row, options))
        parts.append(f"### {heading}\n\n| option | meaning |\n| --- | --- |\n{rows}\n")
    examples = command.epilog.strip("\n").removeprefix("Examples:\n")
    parts.append(f"Examples:\n\n```\n{inspect.cleandoc(examples)}\n```\n")
    return "\n".join(parts)


def page() -> str:
    """Return the whole page."""
    listed = "".join(f"| `mtpstats {name}` | {words} |\n" for name, words in cli.COMMANDS.items())
    return "\n".join([HEAD + listed, *map(section, cli.COMMANDS), TAIL])


def main() -> int:
    """Write the page, or say that it is old."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != text:
        print("docs/cli.md is out of date: run python docs/make_cli.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
