"""Packages that only the anchors import: installed apart by ``make``, and found by nothing else.

They stay apart because they ask for other releases of what the project runs on, and because transformers and TRL act
differently where they find some of them.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def anchors_folder() -> Path:
    """The folder of the packages: ``anchors`` in the virtual environment, or what INFLIGHT_ANCHORS names."""
    return Path(os.environ.get("INFLIGHT_ANCHORS") or Path(sys.prefix) / "anchors")


@contextmanager
def importable_anchors() -> Iterator[None]:
    """Make the packages importable inside of the block, after everything else that is.

    Afterwards the path, the environment and the handlers and level of the root logger are what they were: verl sets
    both on import. Raises `FileNotFoundError` if the packages are installed neither there nor with the others.
    """
    folder = anchors_folder()
    environment, root = dict(os.environ), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    sys.path.append(str(folder))
    try:
        yield
    except ModuleNotFoundError as error:
        if folder.is_dir():
            raise
        raise FileNotFoundError(f"{folder} is missing: make installs the frameworks to compare with there") from error
    finally:
        sys.path.remove(str(folder))
        root.handlers[:] = handlers
        root.setLevel(level)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
