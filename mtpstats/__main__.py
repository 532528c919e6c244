"""What the command ``mtpstats`` and ``python -m mtpstats`` run: ``cli.main`` and the signals."""

import contextlib
import os
import signal
import sys
from typing import NoReturn

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def run() -> NoReturn:
    """Run the command line; being asked to end is the same as Ctrl-C, from the first import on."""
    try:
        for number in _ENDING:
            if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
                signal.signal(number, signal.default_int_handler)
        from mtpstats.cli import main

        code = main()
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            os.write(2, b"mtpstats: error: interrupted\n")
        code = 130
    for number in (signal.SIGINT, *_ENDING):
        signal.signal(number, signal.SIG_IGN)  # nothing is left to interrupt
    # CPython kills itself with SIGINT when the last exec(), such as that of a dataclass, was
    # interrupted, even if the exception was caught.
    exec("")
    sys.exit(code)


if __name__ == "__main__":
    run()
