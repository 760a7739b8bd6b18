"""The server of the page: an application that shows runs, and threads that follow their files."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inflight.errors import InflightError, InvalidRequestError
from inflight.http.tokens import carries_token
from inflight.observe.trace.files import EventFollower
from inflight.observe.watch import views
from inflight.observe.watch.model import RunModel

FOLLOW_S = 0.5
"""Seconds between checks of the files for new events; ``_TELL_S`` is the time between notifications to pages."""
_TELL_S = 0.2
_HEARTBEAT_S = 15.0
_STEPS_S = 1.5
"""How long, in seconds, a page waits for all steps of a long run before it shows those that have been read."""
_ASSETS = {"index.html": "text/html; charset=utf-8", "page.css": "text/css; charset=utf-8"} | dict.fromkeys(
    ("kit.js", "source.js", "charts.js", "timeline.js", "rollouts.js", "fleet.js", "metrics.js", "page.js"),
    "text/javascript; charset=utf-8",
)
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


def asset(name: str) -> str:
    """Return a file of the page."""
    return files("inflight.observe.watch").joinpath("page", name).read_text(encoding="utf-8")


class Follower(threading.Thread):
    """Reads the events that a run has written and those that it adds, and updates the run's model, until stopped."""

    def __init__(self, run: RunModel) -> None:
        super().__init__(name=f"inflight-watch-{run.directory.name}", daemon=True)
        self.run_model = run
        run.reading.has_steps.clear()
        self._stop_it = threading.Event()

    def run(self) -> None:
        follower = EventFollower(self.run_model.directory)
        try:
            # Steps come first, because they are small and provide most of the page.
            self.run_model.fold(follower.read_steps())
            self.run_model.reading.has_steps.set()
            while not self._stop_it.is_set():
                self.run_model.fold(follower.read())
                self.run_model.reading.is_complete = True
                self._stop_it.wait(FOLLOW_S)
        except InflightError as error:
            self._end(str(error))
        except Exception as error:  # damaged events can cause any error, because nothing has checked their fields
            self._end(f"its events cannot be read: {type(error).__name__}: {error}")
        finally:
            self.run_model.reading.has_steps.set()
            follower.close()

    def _end(self, problem: str) -> None:
        """Show why reading has stopped."""
        self.run_model.reading.problem, self.run_model.status = problem, "unreadable"
        self.run_model.revision += 1

    def stop(self) -> None:
        self._stop_it.set()
        self.join(5.0)


def create_app(runs: Sequence[RunModel], token: str, closing: threading.Event | None = None) -> ASGIApp:
    """Return the application that shows runs to clients with the token; the page itself, without data, is public.

    Once ``closing`` is set, pages are no longer notified of changes, so that the server can end.
    """
    closing = closing or threading.Event()

    def run_of(request: Request) -> RunModel:
        number: int = _number(request.path_params, "run", int)
        if not 0 <= number < len(runs):
            raise InvalidRequestError(f"there is no run {number}: runs are numbered from 0 to {len(runs) - 1}")
        return runs[number]

    def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in _ASSETS:
            return _error(404, f"the page has no file {name!r}")
        return Response(asset(name), media_type=_ASSETS[name])

    def list_runs(_: Request) -> Response:
        names = [run.directory for run in runs]
        return _json([{"name": views.run_name(names, path), "directory": str(path)} for path in names])

    def overview(request: Request) -> Response:
        run = run_of(request)
        run.reading.has_steps.wait(_STEPS_S)  # a page that draws meanwhile would slow down the reading
        return _json(views.overview(run, request.query_params.get("names", "").split(",")))

    def timeline(request: Request) -> Response:
        query = request.query_params
        window = _number(query, "from", float), _number(query, "to", float)
        return _json(views.timeline(run_of(request), *window, _number(query, "width", int)))

    def rollouts(request: Request) -> Response:
        query = request.query_params
        offset, limit = _number(query, "offset", int, 0), _number(query, "limit", int, 50)
        return _json(
            views.rollouts(run_of(request), query.get("state", ""), query.get("order", "newest"), offset, limit)
        )

    def rollout(request: Request) -> Response:
        return _json(views.rollout(run_of(request), _number(request.path_params, "item", int)))

    async def follow(request: Request) -> Response:
        return StreamingResponse(_changes(runs, request, closing), media_type="text/event-stream")

    def guarded(call: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            if not carries_token(request.headers.get("authorization", ""), token):
                return _error(401, "this page requires its token: open the address that inflight printed")
            try:
                if asyncio.iscoroutinefunction(call):
                    return await call(request)  # type: ignore[no-any-return]
                return await run_in_threadpool(call, request)
            except InvalidRequestError as error:
                return _error(400, str(error))

        return answer

    routes = [
        Route("/", page),
        Route("/page/{name}", page),
        Route("/api/runs", guarded(list_runs)),
        Route("/api/follow", guarded(follow)),
        Route("/api/runs/{run}", guarded(overview)),
        Route("/api/runs/{run}/timeline", guarded(timeline)),
        Route("/api/runs/{run}/rollouts", guarded(rollouts)),
        Route("/api/runs/{run}/rollouts/{item}", guarded(rollout)),
    ]
    return _WithHeaders(Starlette(routes=routes))


async def _changes(runs: Sequence[RunModel], request: Request, closing: threading.Event) -> AsyncIterator[str]:
    """Yield server-sent events that list the runs that have changed."""
    known = [-1] * len(runs)
    waited_s = 0.0
    yield "retry: 2000\n\n"
    while not closing.is_set() and not await request.is_disconnected():
        changed = [i for i, run in enumerate(runs) if run.revision != known[i]]
        if changed:
            known = [run.revision for run in runs]
            yield f"event: changed\ndata: {to_json(changed).decode()}\n\n"
            waited_s = 0.0
        elif waited_s > _HEARTBEAT_S:
            yield ": nothing new\n\n"
            waited_s = 0.0
        await asyncio.sleep(_TELL_S)
        waited_s += _TELL_S


class _WithHeaders:
    """Adds headers that keep the browser from running third-party code and from leaking data."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._headers = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def add(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        await self._app(scope, receive, add)


def _json(value: Any) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")


def _error(status: int, what: str) -> Response:
    return Response(to_json({"error": what}), status, media_type="application/json")


def _number(values: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    text = values.get(name, default)
    try:
        return kind(text)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name} must be a number, not {text!r}") from error


@contextlib.contextmanager
def follow_runs(directories: Sequence[Path]) -> Any:
    """Follow runs while the context is open, and yield their `RunModel` objects."""
    followers = [Follower(RunModel(directory)) for directory in directories]
    for follower in followers:
        follower.start()
    try:
        yield [follower.run_model for follower in followers]
    finally:
        for follower in followers:
            follower.stop()
