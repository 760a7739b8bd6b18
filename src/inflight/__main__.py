"""``python -m inflight`` is the command ``inflight``."""

import sys

from inflight.cli import main

sys.exit(main())
