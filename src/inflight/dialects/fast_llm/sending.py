"""Sends weights to a PipelineRL server in its fast-llm mode, in place of Fast-LLM's trainer.

The server follows the event stream and the broadcasts, and never answers. It loads each tensor before it receives the
next header, so once it has received the end of the update, it has either loaded everything or failed. This process
cannot know which. The server has no route for updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inflight.base.threads import run_abandonable
from inflight.base.url_query import options_of, options_of_query
from inflight.contracts import EngineKind, EngineOptions, InferenceEndpoint
from inflight.dialects.fast_llm.events import EVENTS, TrainingFinished, WeightsReady, add_event
from inflight.dialects.fast_llm.redis_streams import DEFAULT_URL, RedisStreams
from inflight.dialects.pipelinerl.channel import WeightChannel
from inflight.dialects.pipelinerl.endpoint import PipelineRlEndpoint
from inflight.engines.routes import EngineRoutes
from inflight.errors import ConfigError, TransferError
from inflight.wire import WeightUpdate

if TYPE_CHECKING:
    import torch

    from inflight.dialects.broadcast_group import BroadcastGroup

_REDIS_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class FastLlmOptions:
    """Facts that a server does not report itself, taken from the query of its URL."""

    redis: str = DEFAULT_URL
    """The Redis server that --redis-host and --redis-port specify; no other trainer or inference server may use it."""
    group: str = ""
    """The ``tcp://HOST:PORT`` in --weight-update-group-init-method. If empty, this process does not send weights."""
    world_size: int = 2
    """Value of --weight-update-group-world-size."""
    dtype: str = ""
    """The dtype in which the server computes (default: the dtype of the checkpoint)."""
    max_concurrent: int = 64
    """Value of --max-num-seqs."""
    timeout_s: float = 300.0
    """How long, in seconds, the server may take to join the group and to receive a tensor."""


class AnnouncedBroadcasts(WeightChannel):
    """Announces each update in the event stream, and broadcasts it in Fast-LLM's framing."""

    def __init__(self, group: BroadcastGroup, redis: RedisStreams, timeout_s: float) -> None:
        self._group = group
        self._redis = redis
        self._timeout_s = timeout_s
        self._num_updates = 0

    @property
    def update_route(self) -> None:
        return None

    @property
    def is_formed(self) -> bool:
        return self._group.is_formed

    def join(self) -> None:
        """Delete the event stream and join the group.

        The server reads the stream from its beginning, and would otherwise wait for old updates.
        """
        self._redis.delete(EVENTS)
        self._group.join()

    async def send(self, routes: EngineRoutes, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send the weights.

        Returns once the server has received the end of the update, which it does after it has loaded the tensors.
        """
        try:
            await run_abandonable(lambda: self._send(update, tensors), "inflight-broadcast")
        except BaseException:
            self._group.abort()  # the ranks are out of step
            raise

    def _send(self, update: WeightUpdate, tensors: Mapping[str, torch.Tensor]) -> None:
        from inflight.dialects.fast_llm.framing import WEIGHTS, TensorHeader, send_header

        add_event(self._redis, WeightsReady(step=self._num_updates, documents_seen=update.version))
        self._num_updates += 1
        for spec in update.manifest.tensors:
            send_header(self._group, TensorHeader(WEIGHTS, spec), self._timeout_s)
            self._group.broadcast(tensors[spec.name].contiguous(), self._timeout_s, f"sending {spec.name}")
        send_header(self._group, None, self._timeout_s)

    def close(self) -> None:
        """Announce the end of training, which makes the server leave the group."""
        try:
            if self._group.is_formed:
                add_event(self._redis, TrainingFinished())
        except TransferError:
            pass  # without Redis, only the end of the group notifies the server
        finally:
            self._group.abort()
            self._redis.close()


class FastLlmKind(EngineKind):
    """Supports only attaching, because PipelineRL's own launcher starts the servers."""

    name = "fast_llm"

    def command(self, options: EngineOptions, host: str, port: int) -> list[str]:
        raise ConfigError(
            "PipelineRL's servers are started by PipelineRL: python -m pipelinerl.entrypoints.run_vllm1 "
            f"--weight-update-mode fast-llm. Attach with fast_llm+http://{host}:{port}?group=tcp://HOST:PORT"
        )

    def connect(
        self, url: str, *, token: str | None, control_timeout_s: float, generate_timeout_s: float
    ) -> InferenceEndpoint:
        """Return an endpoint for a URL whose query has the fields of `FastLlmOptions`.

        No token is used. Raises `ConfigError`.
        """
        address, _, query = url.partition("?")
        return _endpoint(
            address,
            options_of_query(FastLlmOptions, query),
            control_timeout_s=control_timeout_s,
            generate_timeout_s=generate_timeout_s,
        )


FAST_LLM = FastLlmKind()


def attach(model_dir: Path, *, url: str, **options: Any) -> PipelineRlEndpoint:
    """Return the endpoint of the server at ``url``, for ``inflight serve MODEL_DIR --engine module:function``.

    Options are those of `FastLlmOptions`. Raises `ConfigError`.
    """
    return _endpoint(url, options_of(FastLlmOptions, options), model_dir=model_dir)


def _endpoint(url: str, options: FastLlmOptions, **more: Any) -> PipelineRlEndpoint:
    def make_channel() -> WeightChannel:
        from inflight.dialects.broadcast_group import BroadcastGroup
        from inflight.dialects.fast_llm.framing import fast_llm_rank_of

        place = fast_llm_rank_of(
            options.group, rank=0, world_size=options.world_size, timeout_s=options.timeout_s, hosts_store=True
        )
        redis = RedisStreams(options.redis, min(options.timeout_s, _REDIS_TIMEOUT_S))
        return AnnouncedBroadcasts(BroadcastGroup(place), redis, options.timeout_s)

    return PipelineRlEndpoint(
        url,
        make_channel if options.group else None,
        engine="fast_llm",
        dtype=options.dtype,
        max_concurrent=options.max_concurrent,
        timeout_s=options.timeout_s,
        **more,
    )
