"""Updates from directories, for protocols in which a trainer pauses a server, names a directory, and resumes the
server.

Each update is one publish: a directory is checked completely before any of it is sent to an endpoint, and the endpoints
commit together. A pause is a publish that the endpoints have accepted but whose weights are not known until an update
sends them. A pause ends when `resume` is called, when its lease expires or, if this process has ended, when the
endpoints' own leases expire.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from inflight.base.requirements import require
from inflight.base.tasks import TaskOwner, run_together
from inflight.base.threads import run_abandonable
from inflight.dialects.update_files import Stamp, check_adapter, check_files, directory_below
from inflight.errors import ConfigError, InflightError, InvalidRequestError, PublishError
from inflight.model.checkpoint_specs import checkpoint_of
from inflight.types import PublishReport
from inflight.weights.encode.buckets import DEFAULT_BUCKET_BYTES
from inflight.weights.send.gathering import weight_update_of
from inflight.weights.send.open_publish import OpenPublish
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.send.stored import AdapterWeights, CheckpointWeights
from inflight.wire import EndpointState, InFlightPolicy, Needs, WeightUpdate

T = TypeVar("T")

INITIAL_LABEL = "default"
"""The label that vLLM and SGLang report for the weights with which a server was started."""
_NUM_LABELS = 4096
_UNREADABLE = (OSError, ValueError, RecursionError)
"""Errors other than `ConfigError` that damaged files may cause, for example a header with invalid names or shapes."""
_LEASE_SLACK_S = 5.0


class DirectoryUpdates:
    """Updates the endpoints to which ``publisher`` is connected, one update at a time. Belongs to one event loop.

    Only files below ``root`` are read. ``model_dir`` is the checkpoint that the endpoints were started with. A pause
    ends ``lease_s`` seconds after the last call of `pause`, `renew`, `load` or `load_adapter`. An update may take
    ``timeout_s`` seconds. ``note`` receives a line for each update, and for each pause that ends because its lease has
    expired or could not be renewed. Raises `ConfigError` if the endpoints' models differ or the checkpoint cannot be
    read.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        model_dir: Path,
        root: Path,
        *,
        lease_s: float,
        timeout_s: float,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        dtypes = {can.dtype for can in publisher.endpoints.values()}
        if len(dtypes) > 1:
            raise ConfigError(
                f"the servers compute in different dtypes, but must use the same one: {', '.join(sorted(dtypes))}"
            )
        (self.dtype,) = dtypes
        vocab_size, specs = checkpoint_of("the servers", model_dir, self.dtype)
        if specs is None:
            raise ConfigError(f"model directory {str(model_dir)!r} does not exist")
        for endpoint, can in publisher.endpoints.items():
            if can.vocab_size != vocab_size:
                raise ConfigError(
                    f"{endpoint.name} serves a model of {can.vocab_size} tokens, but {str(model_dir)!r} has "
                    f"{vocab_size}: name the checkpoint that the servers were started with"
                )
        self._model = CheckpointWeights(model_dir, self.dtype, specs)
        self._publisher = publisher
        self._root = root.resolve()
        self.lease_s = lease_s
        self.timeout_s = timeout_s
        self._note = note
        self._lock = asyncio.Lock()
        self._calls = TaskOwner()
        self._leases = TaskOwner()
        self._paused: tuple[OpenPublish, WeightUpdate] | None = None
        self._relabelled: tuple[int, str] | None = None
        self._opening: OpenPublish | None = None
        """The pause that some endpoints have not accepted yet."""
        self._labels: OrderedDict[int, str] = OrderedDict()
        self._serves_adapter = False
        self._applied: tuple[Stamp, int] | None = None
        """The directory of the last update, and its version."""

    def label_of(self, version: int) -> str:
        """Return the name that clients use for a version: the label of its update, or its number."""
        return self._labels.get(version, str(version) if version else INITIAL_LABEL)

    def served_label(self, version: int) -> str:
        """Return the name that clients use for the version currently served, which `relabel` may have changed."""
        relabelled = self._relabelled
        return relabelled[1] if relabelled is not None and relabelled[0] == version else self.label_of(version)

    def relabel(self, version: int, label: str) -> None:
        """Change the label of the version that is currently served.

        While sampling is paused, the tokens already sampled with the version keep their label.
        """
        if self.pause_policy is None:
            self._label(version, label)
        else:
            self._relabelled = (version, label)

    @property
    def serves_adapter(self) -> bool:
        """Whether the last update was a LoRA."""
        return self._serves_adapter

    @property
    def pause_policy(self) -> InFlightPolicy | None:
        """The in-flight policy of the pause; None while sampling is not paused."""
        return None if self._paused is None or self._paused[0].is_over else self._paused[1].in_flight

    async def pause(self, in_flight: InFlightPolicy) -> None:
        """Pause sampling until an update or `resume`; if it is already paused with this policy, only renew the lease.

        Raises `PublishError` if an endpoint refuses; all endpoints are then resumed.
        """

        def begin() -> None:
            if self.pause_policy not in (None, in_flight):
                self._end_pause("the client chose another policy")
            self._renew()
            if self.pause_policy is None:
                self._paused = self._open(in_flight)

        await self._alone(begin)
        self._start_lease()

    async def renew(self) -> None:
        """Renew the lease of a pause, if there is one."""
        await self._alone(self._renew)
        self._start_lease()

    async def resume(self) -> None:
        """End a pause, even one that is still waiting for requests; the endpoints keep serving their weights."""
        if (opening := self._opening) is not None:
            await run_abandonable(lambda: opening.end("the client resumed sampling"), "inflight-dialect-resume")
        await self._alone(lambda: self._end_pause("the client resumed sampling"))

    async def load(
        self, path: str, *, label: str | None = None, in_flight: InFlightPolicy = InFlightPolicy.KEEP
    ) -> int:
        """Serve the weights of a checkpoint directory on every endpoint, ending any pause, and return their version.

        A repeated call for a directory that is already served and has not changed only sets the label and ends any
        pause. ``in_flight`` applies unless sampling is paused. Raises `InvalidRequestError`, without changing anything,
        for a directory that is not below the root or cannot be used. Raises `PublishError` if an endpoint did not apply
        the update. If sampling was paused before an error, it remains paused or is paused again.
        """
        return await self._update(lambda: self._load(path, label, in_flight))

    async def load_adapter(self, path: str, *, label: str) -> int:
        """Serve the LoRA of a directory instead of any earlier LoRA, and return its version.

        Raises the same errors as `load`, and `UnsupportedError` if an endpoint does not support LoRA. If sampling is
        paused, the pause ends for the update and begins again after it.
        """
        return await self._update(lambda: self._load_adapter(path, label))

    async def aclose(self) -> None:
        """End any pause."""
        await self._leases.aclose()
        await self._alone(lambda: self._end_pause("the server of the dialect was stopped"))
        await self._calls.aclose()

    # ------------------------------------------------------------------------------------- in a thread, one at a time

    def _load(self, path: str, label: str | None, in_flight: InFlightPolicy) -> int:
        self._renew()
        directory = directory_below(self._root, path)
        stamp = check_files(directory, self._root)
        if self._applied is not None and self._applied[0] == stamp and self._is_served(self._applied[1]):
            version = self._applied[1]
            self._label(version, label)
            self._end_pause("the weights of the directory are already served")
            return version
        with _refused(*_UNREADABLE):
            weights = CheckpointWeights(directory, self.dtype, self._model.parameter_specs())
            weights.check_values()
        if self.pause_policy is None:
            version = self._next_version()
            with self._labelled(version, label), _refused():
                publish_weights(
                    weights, self._publisher, in_flight=in_flight, deadline_s=self.timeout_s, version=version
                )
        else:
            assert self._paused is not None
            with self._still_paused():
                (opened, update), self._paused = self._paused, None
                version = update.version
                with self._labelled(version, label), _refused():
                    _require(opened.send(weights.gather_weights(update.buckets)))
        self._serves_adapter, self._applied = False, (stamp, version)
        self._note(f"version {version} is served, from {directory}")
        return version

    def _load_adapter(self, path: str, label: str) -> int:
        self._renew()
        directory = directory_below(self._root, path)
        check_files(directory, self._root)
        policy = self.pause_policy
        in_flight = policy or InFlightPolicy.KEEP
        with _refused(*_UNREADABLE):
            weights = AdapterWeights(directory, self.dtype)
            update = weight_update_of(
                weights,
                run_id=self._publisher.run_id,
                incarnation=self._publisher.incarnation,
                bucket_bytes=DEFAULT_BUCKET_BYTES,
                deadline_s=self.timeout_s,
                in_flight=in_flight,
            )
            check_adapter(directory, update.manifest, self._model.parameter_specs())
            weights.check_values()
        for endpoint, can in self._publisher.endpoints.items():
            require(can, Needs.of_update(update), endpoint.name)
        with self._still_paused():
            self._end_pause("a LoRA is loaded")
            version = self._next_version()
            with self._labelled(version, label), _refused():
                publish_weights(
                    weights, self._publisher, in_flight=in_flight, deadline_s=self.timeout_s, version=version
                )
        self._serves_adapter, self._applied = True, None
        self._note(f"version {version} is served: the LoRA {label!r} from {directory}")
        if policy is not None:
            self._paused = self._open(policy)
        return version

    def _open(self, in_flight: InFlightPolicy) -> tuple[OpenPublish, WeightUpdate]:
        """Begin a publish of the model's tensors, and return once sampling is paused."""
        deadline_s = self.lease_s + self.timeout_s
        update = weight_update_of(
            self._model,
            run_id=self._publisher.run_id,
            incarnation=self._publisher.incarnation,
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            deadline_s=deadline_s,
            in_flight=in_flight,
            version=self._next_version(),
        ).model_copy(update={"deadline_s": self.timeout_s, "lease_s": self.lease_s + _LEASE_SLACK_S})
        endpoints = self._publisher.endpoints
        opened = self._publisher.open(endpoints, update, deadline_s=deadline_s, num_needed=len(endpoints), staged=False)
        self._opening = opened
        try:
            opened.wait_until_accepted()
        finally:
            self._opening = None
        return opened, update

    @contextlib.contextmanager
    def _still_paused(self) -> Iterator[None]:
        """If the body fails, pause sampling again if it was paused before."""
        policy = self.pause_policy
        try:
            yield
        except Exception:
            if policy is not None and self.pause_policy is None:
                try:
                    self._paused = self._open(policy)
                except InflightError as error:
                    self._note(f"sampling could not be paused again after a failed update: {error}")
            raise

    def _renew(self) -> None:
        """Renew the leases of a pause on the endpoints by repeating the request that they have accepted. If an endpoint
        refuses, end the pause.
        """
        if self._paused is None or self.pause_policy is None:
            return
        _, update = self._paused
        endpoints = self._publisher.endpoints
        try:
            self._publisher.run(lambda: run_together(*(it.request_weight_update(update) for it in endpoints)))
        except InflightError as error:
            self._end_pause(f"its lease could not be renewed: {error}")
            self._note(f"sampling was resumed: the lease of the pause could not be renewed: {error}")

    def _end_pause(self, why: str) -> None:
        paused, self._paused = self._paused, None
        if paused is not None:
            paused[0].end(why)

    def _next_version(self) -> int:
        served = [self._publisher.run(endpoint.weight_version) for endpoint in self._publisher.endpoints]
        return 1 + max(it.version for it in served)

    def _is_served(self, version: int) -> bool:
        served = [self._publisher.run(endpoint.weight_version) for endpoint in self._publisher.endpoints]
        return all(
            it.version == version and it.run_id == self._publisher.run_id and it.state is not EndpointState.POISONED
            for it in served
        )

    @contextlib.contextmanager
    def _labelled(self, version: int, label: str | None) -> Iterator[None]:
        """Label a version before any token is sampled with it. If the body fails, the version has no label."""
        self._unlabel(version)
        self._label(version, label)
        try:
            yield
        except BaseException:
            self._unlabel(version)
            raise

    def _unlabel(self, version: int) -> None:
        self._labels.pop(version, None)
        if self._relabelled is not None and self._relabelled[0] == version:
            self._relabelled = None

    def _label(self, version: int, label: str | None) -> None:
        if label is not None:
            self._unlabel(version)
            self._labels[version] = label
            while len(self._labels) > _NUM_LABELS:
                self._labels.popitem(last=False)

    # ------------------------------------------------------------------------------------------------------------------

    async def _alone(self, call: Callable[[], T]) -> T:
        """Run a blocking call after all earlier ones. The call runs to its end even if the caller is cancelled."""

        async def run() -> T:
            async with self._lock:
                return await run_abandonable(call, "inflight-dialect-update")

        return await asyncio.shield(self._calls.start(run()))

    async def _update(self, call: Callable[[], T]) -> T:
        """Run an update, during which the lease of a pause does not expire, and renew the lease after it."""
        self._leases.cancel()
        try:
            return await self._alone(call)
        finally:
            self._start_lease()

    def _start_lease(self) -> None:
        self._leases.cancel()
        if self._paused is not None:
            self._leases.start(self._expire(self._paused[0]))

    async def _expire(self, opened: OpenPublish) -> None:
        await asyncio.sleep(self.lease_s)

        def end() -> None:
            if self._paused is not None and self._paused[0] is opened:
                why = f"no call renewed the pause within its lease of {self.lease_s:g} s"
                self._end_pause(why)
                self._note(f"sampling was resumed: {why}")

        await self._alone(end)


@contextlib.contextmanager
def _refused(*others: type[Exception]) -> Iterator[None]:
    """Convert a `ConfigError`, or one of ``others``, to an `InvalidRequestError`: the request named the directory."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, (ConfigError, *others)):
            raise
        raise InvalidRequestError(str(error)) from error


def _require(report: PublishReport) -> None:
    if not report.succeeded:
        raise PublishError(f"the update did not reach every endpoint: {report.summary()}", report)


def policy_of(mode: str, *, clears_cache: bool) -> InFlightPolicy:
    """Return a pause's policy: ``keep`` freezes running requests, ``wait`` lets them finish, ``abort`` ends them.

    Raises `InvalidRequestError`.
    """
    frozen = InFlightPolicy.RECOMPUTE if clears_cache else InFlightPolicy.KEEP
    policies = {"keep": frozen, "wait": InFlightPolicy.DRAIN, "abort": InFlightPolicy.ABORT}
    if mode not in policies:
        raise InvalidRequestError(f"mode is {mode!r}, but must be one of {', '.join(policies)}")
    return policies[mode]
