"""``python -m mtpstats`` is the command ``mtpstats``."""

import sys

from mtpstats.cli import main

sys.exit(main())
