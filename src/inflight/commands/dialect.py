"""The command ``inflight dialect``: one module and one subcommand for each protocol."""

from __future__ import annotations

import argparse

from inflight.commands import dialect_engine, dialect_fast_llm, dialect_pipelinerl

PROTOCOLS = {
    "fast_llm": (dialect_fast_llm, "update inference servers with the weights that Fast-LLM's trainer broadcasts"),
    "pipelinerl": (dialect_pipelinerl, "serve the routes of PipelineRL's inference servers"),
    "vllm": (dialect_engine, "serve vLLM's own routes, with pauses and updates from directories"),
    "sglang": (dialect_engine, "serve SGLang's own routes, with pauses and updates from disk"),
}
"""For each protocol, its module, which has ``add_arguments`` and ``run`` like a command, and its help line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each protocol."""
    protocols = parser.add_subparsers(dest="protocol", required=True, metavar="PROTOCOL")
    for name, (module, help_text) in PROTOCOLS.items():
        module.add_arguments(
            protocols.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
        )


def run(arguments: argparse.Namespace) -> int:
    """Serve the protocol until a signal is received or the protocol ends."""
    module, _ = PROTOCOLS[arguments.protocol]
    return int(module.run(arguments))
