"""What inflight has to know to start the plain server by itself, and to attach to one that runs."""

from pathlib import Path

from inflight.contracts import EngineKind
from tests.conformance.plain.endpoint import PlainEndpoint


class PlainKind(EngineKind):
    name, health_path, liveness_path = "plain", "/info", None

    def command(self, options, host, port):
        """What follows `python` on the command line."""
        return [str(Path(__file__).with_name("server.py")), str(options.model), str(port), *options.arguments]

    def environment(self, options):
        return {} if options.threads is None else {"OMP_NUM_THREADS": str(options.threads)}

    def connect(self, url, *, token, control_timeout_s, generate_timeout_s):
        """Nothing is sent here: the server may be starting still."""
        return PlainEndpoint(url)


KIND = PlainKind()
