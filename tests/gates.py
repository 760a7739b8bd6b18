"""Gates: tests hold a server, a trainer or a process at a named point, look, and let it continue.

A test that looks at a moment makes that moment last: it closes a gate, waits until somebody has come to it, looks, and
opens it. Gates are files, so that they hold other processes as well as threads of this one:

- `Gate` holds whatever calls `pass_through`, and tells who waits at it.
- `StepGate` is a trainer that trains up to a version and waits there (``--train.trainer``).
- `Brake` is a server that samples so slowly that a request cannot end (``--engine``), or an engine in this process.
- `ReceiveGate` holds a server in the middle of receiving weights (``--engine``).
- `StartGate` holds the start of a run's servers or trainers.

Deadlines: what has been let go is waited for `SOON_S`, which a passing test never spends. What must not be waited for
has `NEVER_S`, so that only what the test is about can end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import inspect
import os
import random
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from inflight.contracts import WorkerKind
from tests.servers import ServerProcess

SOON_S = 60.0
"""What has been let go has happened by then, on a machine that does a lot of other work too."""
NEVER_S = 3600.0
"""A deadline that a test never waits for: longer than the test may take."""
_LOOK_S = 0.01
"""How often whoever waits at a gate looks at it."""
_LOOK_AGAIN_S = 0.002
"""How often a condition is looked at: an engine samples many tokens in a hundredth of a second."""
_NOT_MET = "the condition was not met in time"
_HELD_S = 300.0
"""What a test that failed has left at a gate continues then."""
_ROOT = Path(__file__).parents[1]


def wait_until(
    condition: Callable[[], object], what: Callable[[], str] | str = _NOT_MET, timeout_s: float = SOON_S
) -> None:
    """Wait until a condition is true; fail with what was waited for if it never is. A condition that takes long to
    find out, such as the answer of a server, is looked at less often.
    """
    deadline = time.monotonic() + timeout_s
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < deadline, what if isinstance(what, str) else what()
        time.sleep(max(_LOOK_AGAIN_S, time.monotonic() - began))
        began = time.monotonic()


async def until(condition: Callable[[], Awaitable[object] | object], what: str = _NOT_MET) -> None:
    """Wait until a condition, or what it awaits, is true; fail with what was waited for if it never is."""
    deadline = time.monotonic() + SOON_S
    while not (await met if inspect.isawaitable(met := condition()) else met):
        assert time.monotonic() < deadline, what
        await asyncio.sleep(_LOOK_AGAIN_S)


class Gate:
    """A gate at a path, which any process may come to. It is open until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = path.with_name(f"{path.name}.waiting")

    def close(self) -> Gate:
        """From here on, whoever comes waits."""
        self._waiting.unlink(missing_ok=True)
        self.path.touch()
        return self

    def open(self) -> None:
        """Let everybody continue."""
        self.path.unlink(missing_ok=True)

    def pass_through(self, who: object = "") -> None:
        """Return once the gate is open; while it is closed, leave a note that somebody waits."""
        given_up = time.monotonic() + _HELD_S
        while self.path.exists() and time.monotonic() < given_up:
            _write(self._waiting, str(who))
            time.sleep(_LOOK_S)

    def waiting(self) -> str | None:
        """Return who waits at the gate, or has waited since it was closed; None if nobody has come."""
        return self._waiting.read_text() if self._waiting.exists() else None

    def wait_for_somebody(self) -> str:
        """Return who waits at the gate, as soon as there is somebody."""
        wait_until(lambda: self.waiting() is not None, f"nobody came to {self.path}")
        return self.waiting() or ""


def _write(path: Path, text: str) -> None:
    """Write a file as a whole: nobody reads a part of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text)
    partial.replace(path)


# ------------------------------------------------------------------------------------------------------- of trainers


class StepGate:
    """A run whose trainer makes the steps that lead to ``version``, and waits before the next one."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.allow(version)

    @property
    def settings(self) -> tuple[str, ...]:
        """What makes a run's trainer come to this gate."""
        options = f'{{ gate = "{self.path}" }}'
        return ("--train.trainer", f"{__name__}:GATED", "--train.trainer_options", options)

    def allow(self, version: int) -> None:
        """Let the trainer train up to a later version."""
        _write(self.path, str(version))

    def open(self) -> None:
        """Let the trainer train on without end."""
        self.allow(sys.maxsize)


class GatedKind(WorkerKind):
    """Workers of FSDP2 that come to the `StepGate` at ``gate`` before each step."""

    def create(self, settings: Mapping[str, object]) -> Any:
        import torch

        from inflight_fsdp import FsdpWorker, WorkerConfig
        from inflight_fsdp.config import parse_config
        from inflight_fsdp.sharded import make_worker

        class GatedWorker(FsdpWorker):
            def backward(self, loss: torch.Tensor) -> None:
                given_up = time.monotonic() + _HELD_S
                while self.version >= int(gate.read_text()) and time.monotonic() < given_up:
                    time.sleep(_LOOK_S)
                super().backward(loss)

        others = dict(settings)
        gate = Path(str(others.pop("gate")))
        return make_worker(GatedWorker, parse_config(others, WorkerConfig))


GATED = GatedKind()


# -------------------------------------------------------------------------------------------------------- of servers


class Brake:
    """While it is on, each step of an engine takes so long that no request ends by itself. It is off at first."""

    STEP_S = 0.1
    """A request of 1000 tokens takes 100 s."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = path.with_name(f"{path.name}.held")
        """One byte for each forward that was held."""

    def put_on(self) -> None:
        self._held.write_bytes(b"")
        self.path.touch()

    def wait_for_forwards(self, num: int) -> None:
        """Return once this many forwards have begun since the brake was put on; all but the last have ended."""
        wait_until(lambda: self._held.stat().st_size >= num, "the engine does not compute")

    def release(self) -> None:
        self.path.unlink(missing_ok=True)

    @property
    def is_on(self) -> bool:
        return self.path.exists()

    def __enter__(self) -> None:
        self.put_on()

    def __exit__(self, *_: object) -> None:
        self.release()

    def hold_back(self, model: Any) -> None:
        """Brake every forward of a model."""

        def hold(*_: object) -> None:
            if self.is_on:
                with self._held.open("ab") as held:
                    held.write(b".")
                time.sleep(self.STEP_S)

        model.register_forward_pre_hook(hold)


BRAKE = "INFLIGHT_TESTS_BRAKE"
"""Environment variable: the path of the brake of a server that `braked` makes."""


def braked(model: Path, **options: Any) -> Any:
    """Return the embedded endpoint with a brake, for ``inflight serve --engine tests.gates:braked``."""
    import torch

    from inflight.engines.embedded.loading import load_endpoint

    torch.set_num_threads(options.pop("threads", 1))
    endpoint: Any = load_endpoint(model, **options)
    Brake(Path(os.environ[BRAKE])).hold_back(_model_of(endpoint))
    return endpoint


def _model_of(endpoint: Any) -> Any:
    """Return the module whose forward is a step of an embedded endpoint's engine."""
    return endpoint._engine.weights.model.base_model


class Slowed:
    """An engine in this process that takes its time once it has sampled ``num_tokens``."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens


@contextlib.contextmanager
def slowed(endpoint: Any, after: int = 0) -> Iterator[Slowed]:
    """Slow an engine down once it has sampled some tokens: what runs then runs until this is left."""
    limit = Slowed(after)

    def wait(*_: object) -> None:
        if endpoint.stats().num_tokens >= limit.num_tokens:
            time.sleep(Brake.STEP_S)

    hook = _model_of(endpoint).register_forward_pre_hook(wait)
    try:
        yield limit
    finally:
        hook.remove()


class BrakedServer(ServerProcess):
    """A server process with a brake."""

    def __init__(self, model: Path, directory: Path, *arguments: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.brake = Brake(directory / "brake")
        engine = ("--engine", f"{__name__}:braked")
        super().__init__(model, directory, *engine, *arguments, environment={BRAKE: str(self.brake.path)})


RECEIVE_GATE = "INFLIGHT_TESTS_RECEIVE_GATE"
"""Environment variable: the path of the gate of a server that `held_while_receiving` makes."""


def held_while_receiving(model: Path, **options: Any) -> Any:
    """Return the embedded endpoint, which passes a gate before each bucket of weights that it receives."""
    import torch

    from inflight.engines.embedded.loading import load_endpoint

    torch.set_num_threads(options.pop("threads", 1))
    endpoint: Any = load_endpoint(model, **options)
    gate, receive = Gate(Path(os.environ[RECEIVE_GATE])), endpoint.receive_weights

    async def receive_behind_gate(bucket: Any) -> None:
        await asyncio.to_thread(gate.pass_through)
        await receive(bucket)

    endpoint.receive_weights = receive_behind_gate
    return endpoint


class GatedServer(ServerProcess):
    """A server process that passes a gate before each bucket of weights that it receives."""

    def __init__(self, model: Path, directory: Path, *arguments: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.gate = Gate(directory / "gate")
        engine = ("--engine", f"{__name__}:held_while_receiving")
        super().__init__(model, directory, *engine, *arguments, environment={RECEIVE_GATE: str(self.gate.path)})


class StartGate(Gate):
    """A gate that processes of a run pass when they start, if their command has a word, such as ``serve``."""

    def __init__(self, directory: Path, word: str) -> None:
        super().__init__(directory / "start")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "sitecustomize.py").write_text(
            f"import pathlib, sys, time\n"
            f"while {word!r} in sys.argv and pathlib.Path({str(self.path)!r}).exists():\n"
            f"    pathlib.Path({str(self._waiting)!r}).touch()\n"
            f"    time.sleep({_LOOK_S})\n"
        )
        self.environment = {"PYTHONPATH": os.pathsep.join(map(str, (directory, _ROOT / "src", _ROOT)))}


# ----------------------------------------------------------------------------------------------------------- of ports

_kept_ports: list[int] = []
"""File descriptors of the locks of ports that this process has."""


def reserved_port() -> int:
    """Return a port that is free, that no other test gets, and that the system gives to nobody who asks for any port.

    For servers that start again at their port, and where an address must be known before somebody listens there.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    locks = Path(tempfile.gettempdir()) / f"inflight-test-ports-{os.getuid()}"
    locks.mkdir(exist_ok=True)
    for port in random.Random().sample(range(max(1025, first - 8000), first), 500):
        lock = os.open(locks / str(port), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
        except OSError:
            os.close(lock)
        else:
            _kept_ports.append(lock)
            return port
    raise AssertionError("no port is free below those that the system gives away")
