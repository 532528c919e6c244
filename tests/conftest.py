"""What all tests rely on."""

import os
import signal

# Users buffer their output, and what a process that ends at once still holds is lost.
os.environ.pop("PYTHONUNBUFFERED", None)

# Shells let what they start in the background ignore Ctrl-C, and processes inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
