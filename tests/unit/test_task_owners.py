"""Who may begin a task: `inflight.base.tasks`, task groups, and the modules that are listed here with who owns it."""

from __future__ import annotations

import ast
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"

OWNERS = {
    "inflight/base/tasks.py": "all tasks that belong to one call, and those of a `TaskOwner`",
    "inflight/conformance/endpoint/http.py": "the check cancels its reader and awaits it",
    "inflight/conformance/endpoint/judged.py": "a check may hang for ever: the judge reports it and leaves it",
    "inflight/conformance/endpoint/messages.py": "the check cancels the call whose caller goes away, and awaits it",
    "inflight/conformance/endpoint/subject.py": "the subject ends the calls of a check when it leaves the check",
    "inflight/conformance/endpoint/waiting.py": "a call may ignore that it is cancelled: the check fails without it",
    "inflight/conformance/fleet/faults.py": "the call that is delivered twice awaits the other one",
    "inflight/conformance/fleet/served.py": "a server owns its return, which `aclose` awaits",
    "inflight/dialects/pipelinerl/channel.py": "the group is aborted between a failure and the end of the sender",
    "inflight/dialects/running_requests.py": "the registry owns the call of each request, which another route may end",
    "inflight/engines/detached_calls.py": "`AttachOnce` owns what all its callers wait for",
    "inflight/engines/streams.py": "a stream owns what samples it",
    "inflight/environments/play_loop.py": "one loop per thread of episodes; the loop's owner ends them",
    "inflight/environments/proxy/app.py": "a streamed answer owns what samples it",
    "inflight/http/listening.py": "a server in this loop owns what serves",
    "inflight/http/incoming_requests.py": "a request owns its answer and its client's watch",
    "inflight/http/serving.py": "a server process owns what runs beside it",
    "inflight/launchers/ray.py": "a process owns what waits for its end, which `stop` awaits",
    "inflight/run/ranks/group.py": "all ranks are asked, and their failures are weighed after a grace period",
    "inflight/run/record/recording.py": "the recording owns the step that it writes, which `written` awaits",
    "inflight/run/sampling/actor.py": "the actor owns what it samples and scores",
    "inflight/run/sampling/scoring.py": "the process of a task owns what reads its answers, which `stop` awaits",
    "inflight/run/servers/leases.py": "a leased server owns its watch, which `stop` awaits",
}


def begins_tasks(tree: ast.Module) -> bool:
    """Return whether a module begins tasks by itself, in no task group."""
    groups = {
        item.optional_vars.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AsyncWith)
        for item in node.items
        if ast.unparse(item.context_expr) == "asyncio.TaskGroup()" and isinstance(item.optional_vars, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="asyncio"):
                return True  # under a name that is not looked for below
            case ast.ImportFrom(module="inflight.base.tasks", names=names) if "start" in {it.name for it in names}:
                return True
            case ast.Attribute(value=ast.Name(id=name), attr="create_task") if name in groups:
                pass
            case ast.Attribute(attr="create_task" | "ensure_future"):
                return True
    return False


def test_tasks_are_begun_only_where_somebody_owns_them() -> None:
    files = {str(file.relative_to(SRC)): file.read_text() for file in SRC.rglob("*.py")}
    words = ("create_task", "ensure_future", "from asyncio", "from inflight.base.tasks")  # others need not be parsed
    likely = {name: text for name, text in files.items() if any(word in text for word in words)}
    assert {name for name, text in likely.items() if begins_tasks(ast.parse(text))} == OWNERS.keys()


def test_a_task_without_an_owner_is_found() -> None:
    in_group = "async def f():\n async with asyncio.TaskGroup() as group:\n  group.create_task(g())\n"
    assert not begins_tasks(ast.parse(in_group))
    for line in ("asyncio.create_task(g())", "asyncio.ensure_future(g())", "loop.create_task(g())"):
        assert begins_tasks(ast.parse(f"{in_group}  {line}"))
    assert begins_tasks(ast.parse("from inflight.base.tasks import start"))
    assert begins_tasks(ast.parse("from asyncio import create_task"))
