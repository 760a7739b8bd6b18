"""Embedded servers that die, restart and tear, observed from inside: which weights they sample from."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import shutil
import tempfile
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash

from inflight.conformance.fleet.palette import CHECKPOINT, Palette, Shade, make_checkpoint
from inflight.conformance.fleet.plan import INSIDE, Kind
from inflight.conformance.fleet.servers import Call, Loop, Testbed, TestedServer
from inflight.contracts import InferenceEndpoint
from inflight.engines.embedded.endpoint import EmbeddedEndpoint
from inflight.engines.embedded.engine import Engine
from inflight.engines.embedded.parameters import PreparedParameters
from inflight.engines.embedded.slot_attention import ATTENTION_NAME, register_slot_attention
from inflight.errors import UnreachableError
from inflight.model.checkpoints import load_causal_lm
from inflight.wire import TransportSpec, UpdateRef, WeightVersion

T = TypeVar("T")

MAX_LEN = 256


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return XXH3-128 over the bytes of the tensors, in order; it is computed before every token step."""
    found = xxhash.xxh3_128()
    for tensor in tensors.values():
        found.update(tensor.detach().numpy().data)
    return found.hexdigest()


class DigestedPalette(Palette):
    """A palette that knows the digests of its shades."""

    def __init__(self, *arguments: Any) -> None:
        self._digests: dict[str, Shade] = {}
        super().__init__(*arguments)

    def add(self, shade: Shade) -> None:
        if shade not in self.shades:
            super().add(shade)
            self._digests[digest(self.tensors(shade))] = shade

    def shade_with(self, found: str) -> Shade | None:
        """Return the shade with this digest; None if no known shade has it."""
        return self._digests.get(found)


@dataclass(slots=True, eq=False)
class ServerProcess:
    """One process of a server. ``shades`` are those observed on it, in order; ``problems`` are violations.

    ``fenced_at`` is the number of shades observed before a later trainer joined, and that trainer's incarnation.
    """

    endpoint: EmbeddedEndpoint
    engine: Engine
    model: Any
    shades: list[Shade | None] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    fenced_at: list[tuple[int, int]] = field(default_factory=list)
    was_torn: bool = False
    was_killed: bool = False
    tears: int = 0


class EmbeddedServer(TestedServer):
    """A server of a copy of ``template``."""

    def __init__(self, name: str, template: Any, palette: DigestedPalette) -> None:
        self.name = name
        self.num_breaks = 0
        self.processes: list[ServerProcess] = []
        self._process: ServerProcess | None = None
        self.is_up = self.is_gone = False
        self._template = template
        self._palette = palette
        self._calls: set[asyncio.Task[Any]] = set()
        self._coming_back: asyncio.Task[None] | None = None

    @property
    def num_starts(self) -> int:  # type: ignore[override]
        return len(self.processes)

    @property
    def was_torn(self) -> bool:  # type: ignore[override]
        return any(process.was_torn for process in self.processes)

    async def start(self) -> None:
        """Start a process with the checkpoint."""
        model = copy.deepcopy(self._template)
        engine = Engine(model, max_model_len=MAX_LEN, max_concurrent=8)
        endpoint = WatchedEndpoint(engine, model, name=self.name)
        process = ServerProcess(endpoint, engine, model)
        endpoint.watch(self, process)
        model.base_model.register_forward_pre_hook(lambda *_: self._look(process, is_sampling=True) and None)
        weights: Any = engine.weights
        load = weights.load

        def perhaps_torn(ready: PreparedParameters) -> None:
            if not process.tears:
                load(ready)
                return
            process.tears -= 1
            process.was_torn = True
            load(ready._replace(tensors=ready.tensors[: len(ready.tensors) // 2]))
            raise RuntimeError("loading was torn after half of the tensors")

        weights.load = perhaps_torn
        self.processes.append(process)
        self._process, self.is_up = process, True

    async def deliver(self, call: Call[T]) -> T:
        process = self._process
        if process is None:
            raise UnreachableError("connection refused", self.name)
        task = asyncio.ensure_future(_made(call, process.endpoint))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await task
        except BaseException as error:
            if self._process is not process:
                raise UnreachableError("connection reset", self.name) from error
            raise

    async def inject(self, kind: Kind, seconds: float) -> None:
        assert kind is Kind.TEAR
        if self._process is not None:
            self._process.tears += 1

    async def kill(self, back_after_s: float | None) -> None:
        process, self._process, self.is_up = self._process, None, False
        self.is_gone = self.is_gone or back_after_s is None
        if process is None:
            return
        self.num_breaks += 1
        process.was_killed = True
        for task in list(self._calls):
            task.cancel()
        with contextlib.suppress(Exception):
            await process.endpoint.aclose()
        if back_after_s is not None:
            self._coming_back = asyncio.ensure_future(self._come_back(back_after_s))

    async def back(self) -> None:
        if self._coming_back is not None:
            await self._coming_back

    async def shade(self) -> Shade | None:
        if self._process is None:
            raise UnreachableError("the server is down", self.name)
        return await self.seen(self._process)

    async def seen(self, process: ServerProcess) -> Shade | None:
        """Return the shade of the weights, read between two token steps; None for torn weights."""
        return await asyncio.wrap_future(process.engine.call(lambda: self._look(process, is_sampling=False)))

    def may_have_held(self, shade: Shade) -> bool:
        return any(shade in process.shades or process.was_killed for process in self.processes)

    def problems(self) -> Sequence[str]:
        problems = []
        for process in self.processes:
            problems += process.problems
            for index, incarnation in process.fenced_at:
                old = [
                    shade
                    for shade in process.shades[index:]
                    if shade is not None and 0 < shade.incarnation < incarnation
                ]
                if old:
                    problems.append(f"it applied {old[0]} after the trainer of incarnation {incarnation} had joined")
        return problems

    async def aclose(self) -> None:
        """End everything."""
        if self._coming_back is not None:
            self._coming_back.cancel()
        await self.kill(None)

    async def _come_back(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if not self.is_gone:
            await self.start()
            self.num_breaks += 1

    def _look(self, process: ServerProcess, *, is_sampling: bool) -> Shade | None:
        """Record the shade of the weights, in the engine's thread."""
        found = self._palette.shade_with(digest(dict(torch.nn.Module.named_parameters(process.model))))
        if found is None and is_sampling:
            process.problems.append("sampled from torn weights, which belong to no version")
        if not process.shades or process.shades[-1] != found:
            process.shades.append(found)
        return found


class WatchedEndpoint(EmbeddedEndpoint):
    """An endpoint whose server inspects its weights after a trainer has joined and after each commit."""

    def watch(self, server: EmbeddedServer, process: ServerProcess) -> None:
        """Set the server and the process that inspect the weights."""
        self._server, self._of = server, process

    async def init_process_group(self, spec: TransportSpec) -> None:
        await super().init_process_group(spec)
        await self._server.seen(self._of)
        self._of.fenced_at.append((len(self._of.shades), spec.incarnation))

    async def commit_weight_update(self, ref: UpdateRef) -> WeightVersion:
        answer = await super().commit_weight_update(ref)
        await self._server.seen(self._of)
        return answer


class EmbeddedTestbed(Testbed):
    """Three embedded servers for each schedule. Use as a context manager."""

    kinds = INSIDE
    num_servers = 3
    start_s = 1.0

    def __init__(self, scale: float = 1.0) -> None:
        register_slot_attention()
        self.scale = scale
        self.directory = Path(tempfile.mkdtemp(prefix="inflight-chaos-"))
        self.checkpoint = self.directory / "checkpoint"
        make_checkpoint(self.checkpoint)
        self.template: Any = load_causal_lm(self.checkpoint, attention=ATTENTION_NAME, device=torch.device("cpu"))
        self.like = {name: parameter.detach() for name, parameter in self.template.named_parameters()}
        self.loop = Loop()
        with self.servers(self.palette(0, ()), ()) as servers:
            self.capabilities = self.loop.run(servers[0].deliver(lambda endpoint: endpoint.capabilities()))

    def __enter__(self) -> EmbeddedTestbed:
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def palette(self, seed: int, frozen: tuple[str, ...]) -> DigestedPalette:
        """Return a palette for this schedule alone: its servers begin with the checkpoint."""
        palette = DigestedPalette(self.like, seed, frozen)
        assert palette.shades == [CHECKPOINT]
        return palette

    @contextlib.contextmanager
    def servers(self, palette: Palette, frozen: tuple[str, ...]) -> Iterator[Sequence[TestedServer]]:
        assert isinstance(palette, DigestedPalette)
        servers = [EmbeddedServer(f"server-{i}", self.template, palette) for i in range(self.num_servers)]
        try:
            for server in servers:
                self.loop.run(server.start())
            yield servers
        finally:
            for server in servers:
                self.loop.run(server.aclose())


async def _made(call: Call[T], endpoint: InferenceEndpoint) -> T:
    answer: Awaitable[T] = call(endpoint)
    return await answer
