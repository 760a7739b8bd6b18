"""Tasks are cancelled by `cancel_and_wait`, or awaited in the same function, before what they use is released."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

CANCELLED_ALONE = {
    "conformance/endpoint/tokens.py:a_caller_leaves": "the check is about a caller that leaves; the subject ends it",
    "conformance/endpoint/waiting.py:within": "a call may ignore that it is cancelled: the check fails without it",
    "conformance/fleet/faults.py:flush": "a future of another thread, whose portal ends before the servers do",
    "conformance/tcp_proxy.py:cut": "a `TaskOwner`, which `aclose` awaits; every task owns its connections",
    "conformance/fleet/schedule.py:close": "futures of another thread, whose portal ends before the servers do",
    "dialects/directory_updates.py:_start_lease": "a `TaskOwner`, which `aclose` awaits; the lease owns nothing",
    "dialects/directory_updates.py:_update": "a `TaskOwner`, which `aclose` awaits; the lease owns nothing",
    "dialects/tinker/futures.py:_remove": "a `TaskOwner`, which `aclose` awaits; the call ends its own request",
    "dialects/tinker/futures.py:_remove_after": "a timer",
    "dialects/tinker/futures.py:aclose": "a timer",
    "dialects/tinker/futures.py:retrieve": "a timer",
    "environments/moving.py:leave": "`TaskOwner.run` of each caller awaits the end of its call",
    "environments/play_loop.py:_ended": "a future that has no task",
    "environments/play_loop.py:cancel": "a task in the thread of users' code; its end resolves the caller's future",
    "environments/play_loop.py:fail": "futures that have no task; the blocked thread is left",
    "environments/play_loop.py:stop": "polls until every task of the loop has ended",
    "environments/proxy/app.py:end": "`TaskOwner.run` of each request awaits the end of its call",
    "environments/tools/python_tool.py:run": "a cancel scope, whose group awaits its tasks",
    "http/connections.py:_stop_waiting": "a timer",
    "http/serving.py:_answer": "`wait_for_abandoned_calls` awaits it",
    "http/connection_pool.py:aclose": "a timer",
    "run/ranks/handshake.py:close": "a future that has no task",
    "run/sampling/actor.py:_cancel": "the actor's task group awaits it",
    "run/sampling/episodes.py:at": "a future that has no task",
    "run/sampling/episodes.py:forget": "a `TaskOwner`, which `aclose` awaits; `play` owns the episode",
    "weights/receive/receiver.py:stop_lease": "a timer",
    "weights/send/publisher.py:run": "a future of another thread, whose portal `close` ends",
}
"""Functions, under ``src/inflight``, that cancel and return before the end."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of the functions within it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from own_nodes(node)


def cancels_alone(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function cancels something, and neither awaits it below nor leaves that to a task group."""
    nodes = list(own_nodes(function))
    in_groups = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.AsyncWith) and "asyncio.TaskGroup()" in ast.unparse(node.items[0])
        for inner in ast.walk(node)
    }
    awaited = [(node.lineno, ast.unparse(node)) for node in nodes if isinstance(node, ast.Await)]
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(value=cancelled, attr="cancel"), args=[]) if id(node) not in in_groups:
                name = ast.unparse(cancelled)
                if not any(line > node.lineno and name in text for line, text in awaited):
                    return True
    return False


def test_what_is_cancelled_is_awaited_before_what_it_uses_is_released() -> None:
    found = {
        f"{file.relative_to(SRC)}:{function.name}".removeprefix("inflight/")
        for file in SRC.rglob("*.py")
        if file != SRC / "inflight/base/tasks.py"
        if "cancel" in (text := file.read_text())
        for function in functions(ast.parse(text))
        if cancels_alone(function)
    }
    assert found == CANCELLED_ALONE.keys()


def test_a_cancelled_task_that_nobody_awaits_is_found() -> None:
    def check(body: str) -> bool:
        (function,) = functions(ast.parse(f"async def f():\n{body}"))
        return cancels_alone(function)

    assert check(" task.cancel()\n await close()")
    assert check(" await asyncio.wait([task])\n task.cancel()")
    assert not check(" task.cancel()\n await asyncio.wait([task])")
    assert not check(" async with asyncio.TaskGroup() as group:\n  task.cancel()")
