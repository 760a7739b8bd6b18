"""``python -m tests.chaos``: a campaign of schedules over embedded servers."""

from __future__ import annotations

import sys

from tests.chaos.campaign import main

if __name__ == "__main__":
    sys.exit(main())
