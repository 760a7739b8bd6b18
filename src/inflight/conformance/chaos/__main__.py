"""``python -m inflight.conformance.chaos``: a campaign of schedules."""

from __future__ import annotations

import sys

from inflight.conformance.chaos.campaign import main

if __name__ == "__main__":
    sys.exit(main())
