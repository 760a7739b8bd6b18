"""Defines how inflight starts the plain server and attaches to a running one."""

from pathlib import Path

from inflight.contracts import EngineKind
from tests.conformance.plain.endpoint import PlainEndpoint


class PlainKind(EngineKind):
    name, health_path, liveness_path = "plain", "/info", None

    def command(self, options, host, port):
        """Return the arguments after `python` on the command line."""
        return [str(Path(__file__).with_name("server.py")), str(options.model), str(port), *options.arguments]

    def environment(self, options):
        return {} if options.threads is None else {"OMP_NUM_THREADS": str(options.threads)}

    def connect(self, url, *, token, control_timeout_s, generate_timeout_s):
        """Send nothing here: the server may still be starting."""
        return PlainEndpoint(url)


KIND = PlainKind()
