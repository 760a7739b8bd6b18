"""The command ``inflight policies``."""

from __future__ import annotations

import argparse

from inflight.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", nargs="?", help="policy to describe (default: list all built-in policies)")


def run(arguments: argparse.Namespace) -> int:
    """List the built-in policies, or describe one."""
    from inflight.rollouts.listing import KINDS, described, listed

    if arguments.name is None:
        print("\n".join(listed()))
        return 0
    text = described(arguments.name)
    if text is None:
        known = sorted({name for policies in KINDS.values() for name in policies})
        raise ConfigError(f"unknown policy {arguments.name!r}; known: {', '.join(known)}")
    print(text)
    return 0
