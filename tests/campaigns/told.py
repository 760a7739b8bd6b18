"""Says what a process sees: ``python -m tests.campaigns.told ARGUMENTS``."""

import os
import sys

print(sys.stdin.read(), os.environ["TOLD"], os.getcwd(), sys.executable, sys.argv[1:])
