"""Runs the code on standard input in a `PythonTool` and prints the result: python -m tests.environments.tool_program

tool_program.py ISOLATION TIMEOUT_S < code
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys

from inflight.environments.tools.python_tool import PythonTool
from inflight.errors import InflightError

if __name__ == "__main__":
    tool = PythonTool(isolation=sys.argv[1], timeout_s=float(sys.argv[2]))  # type: ignore[arg-type]
    try:
        print(json.dumps(dataclasses.asdict(asyncio.run(tool.run(sys.stdin.read())))))
    except InflightError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}))
