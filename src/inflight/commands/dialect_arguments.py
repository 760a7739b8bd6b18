"""Arguments that the protocols of ``inflight dialect`` share."""

from __future__ import annotations

import argparse
from pathlib import Path

from inflight.http.tokens import TOKEN_VARIABLE


def add_server_arguments(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add the arguments for the inference servers and for the file with their token."""
    parser.add_argument(
        "urls", nargs="+", metavar="URL", help=f"inference servers to {verb}, such as http://127.0.0.1:8000"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"file with the control token of the inference servers (default: ${TOKEN_VARIABLE})",
    )


def add_update_arguments(group: argparse._ActionsContainer, run_id: str) -> None:
    """Add the arguments for how the servers are updated. ``run_id`` is the default name of the run."""
    group.add_argument("--run-id", default=run_id, help="name of the run (default: %(default)s)")
    group.add_argument(
        "--in-flight",
        choices=("keep", "recompute", "drain", "abort"),
        default="keep",
        help="what to do with running requests during an update (default: keep, as in PipelineRL)",
    )
    group.add_argument(
        "--transport", default="gloo", help="transport from this process to the servers (default: %(default)s)"
    )
    group.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="time limit for each of these: forming the group, receiving a tensor, and updating the servers "
        "(default: %(default)g)",
    )
