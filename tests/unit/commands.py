"""Commands run in this process or in another one, and what they leave."""

import re
import subprocess
import sys

from mtpstats import cli

FAKE = {"prompts": [{}], "settings": {"n_prompts": 1}}
"""What the ``bench`` fixture puts in place of a result."""


def settings_of(bench, *args):
    """Return what ``mtpstats bench --json ARGS`` asked ``run.bench`` for."""
    assert cli.main(["bench", "--json", *args]) == 0
    return bench[-1][0]


def error_line(capsys, *args, code):
    """Run, expect the exit code, and return the one line on standard error."""
    assert cli.main(list(args)) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"mtpstats: error: [^\n]+\n", captured.err), captured.err
    return captured.err


def process(*args, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "mtpstats", *args],
        stderr=subprocess.PIPE,
        check=False,
        timeout=60,
        **kwargs,
    )
