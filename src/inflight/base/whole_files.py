"""Text files that are written atomically, so that readers never see part of one."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write a file atomically, as UTF-8. If `OSError` is raised, the previous file is still complete.

    If ``file`` is a symbolic link or not a regular file, such as a pipe, it is written in place instead.
    """
    if file.is_symlink() or (file.exists() and not file.is_file()):
        file.write_text(text, encoding="utf-8")
        return
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(file)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
