"""Check a release: ``python -m tests.engines.vllm_sources DIRECTORY``, with the folder ``vllm`` of its Python files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.engines.vllm_sources import Sources, counts, lacking


def main() -> int:
    """Print what the sources lack; return the status of the process."""
    parser = argparse.ArgumentParser(prog="python -m tests.engines.vllm_sources", description=__doc__)
    parser.add_argument("directory", type=Path, help="contains the folder vllm of a wheel, or of an environment")
    directory = parser.parse_args().directory
    found = lacking(Sources(directory))
    for assumption, problem in found:
        print(f"{assumption.kind}: {assumption.name}: {problem}")
    total = counts()
    print(f"{total.total() - len(found)} of {total.total()} assumptions hold in the sources under {directory}:")
    for kind, number in total.items():
        print(f"    {kind}: {number - sum(it.kind == kind for it, _ in found)} of {number}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
