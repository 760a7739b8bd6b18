"""Libraries of environments that ``make`` installs apart, in ``.venv/environments``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "environments"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def need(library: str) -> None:
    """Make a library importable, after everything else that is; skip the module where it is missing.

    Fails instead where ``make`` has installed libraries, and this is one of them.
    """
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    if importlib.util.find_spec(library) is None:
        assert not (FOLDER.is_dir() and f"\n{library}==" in REQUIREMENTS.read_text()), f"{FOLDER} lacks {library}"
        pytest.skip(f"{library} is not installed", allow_module_level=True)
