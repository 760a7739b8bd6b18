"""The command ``inflight policies``."""

from __future__ import annotations

import argparse

from inflight.base.unknown_names import unknown_name
from inflight.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("name", nargs="?", help="policy to describe (default: list all built-in policies)")


def run(arguments: argparse.Namespace) -> int:
    """List the built-in policies, or describe one."""
    from inflight.rollouts.listing import KINDS, policy_description, policy_lines

    if arguments.name is None:
        print("\n".join(policy_lines()))
        return 0
    text = policy_description(arguments.name)
    if text is None:
        known = sorted({name for policies in KINDS.values() for name in policies})
        raise ConfigError(unknown_name("policy", arguments.name, known))
    print(text)
    return 0
