"""The command ``inflight serve``."""

from __future__ import annotations

import argparse
import os
import secrets

from inflight.commands.shared import print_line
from inflight.http.server_spec import add_server_arguments, server_spec_of
from inflight.http.tokens import TOKEN_VARIABLE, read_token
from inflight.launchers.launcher import ADDRESS_VARIABLE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_server_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal is received, and return the exit status."""
    from inflight.engines.serving import run_server

    spec = server_spec_of(arguments)
    given_token = read_token(spec.listen.token_file)
    token = given_token or secrets.token_urlsafe(24)

    def print_where(line: str) -> None:
        print_line(line)
        if given_token is None:
            print_line(f"control token {token} (set {TOKEN_VARIABLE} to choose it)")

    host = spec.listen.host or os.environ.get(ADDRESS_VARIABLE, "127.0.0.1")
    run_server(spec, host, token, note=print_line, on_ready=print_where)
    return 0
