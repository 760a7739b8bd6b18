"""Runs the command ``inflight`` when started as ``python -m inflight``."""

import sys

from inflight.cli import main

sys.exit(main())
