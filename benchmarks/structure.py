"""Measures the source before and after a redraw: its size, its packages, and the files that three paths pass through.

    python benchmarks/structure.py BEFORE [--test-seconds BEFORE AFTER]

checks out the commit BEFORE in a directory of its own, measures it and this checkout, each with its own code, and
keeps both in benchmarks/results/structure.json. `make docs` renders the table of docs/evidence-design.md from there.

- Lines are those of every Python and TOML file under src.
- Two packages at the top of `inflight` import each other if the import statements of one lead to the other and back,
  directly or over others. Imports for type checkers do not count.
- The attributes of a class are its annotated fields and what its methods assign to ``self``. Classes whose methods
  assign nothing are left out: messages, events and sections of settings, whose fields are what they are for.
- A publish is one call of `publish_weights` over gloo to an embedded endpoint in this process. It passes through the
  files of src in which a function is called meanwhile.
- A logprob passes through the files between the engine that draws the token and the loss that trains on it whose code
  has a name with ``logprob`` in it.
- ``servers.max_concurrent`` passes through the files of the run, the commands, the HTTP package and the embedded engine
  whose code has that name. The planner, which varies the setting, and adapters of other engines are left out.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

EMBEDDED = ("inflight/local/", "inflight/engines/embedded/")
RUN = ("inflight/pipeline/", "inflight/run/")
MESSAGES = ("inflight/wire.py", "inflight/wire/")
LOGPROB = (*EMBEDDED, *RUN, *MESSAGES, "inflight/http/", "inflight/types.py", "inflight/rollouts/", "inflight/losses/")
LOGPROB_OF_TRAINERS = ("inflight_fsdp/",)
MAX_CONCURRENT = (
    *EMBEDDED,
    *RUN,
    *MESSAGES,
    "inflight/http/",
    "inflight/engines/",
    "inflight/commands/",
    "inflight/cli.py",
)


def num_attributes(node: ast.ClassDef) -> int:
    """Return how many attributes the instances of a class have of its own."""
    names = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            names |= {part.attr} if ast.unparse(part.value) == "self" else set()
    return len(names)


def is_message(node: ast.ClassDef) -> bool:
    """Return whether a class is a table of fields without behaviour: a message, an event or a section of settings."""
    return not any(isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) for part in ast.walk(node))


def named_in(tree: ast.Module) -> Iterator[str]:
    """Yield the names in code, which docstrings are not."""
    for node in ast.walk(tree):
        for kind in ("id", "attr", "arg", "name"):
            if isinstance(name := getattr(node, kind, None), str):
                yield name


def imports_of(tree: ast.AST) -> Iterator[str]:
    """Yield what a module imports, but for what only type checkers see."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not (isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")):
            yield from imports_of(node)


def mutual_imports(src: Path, trees: dict[Path, ast.Module]) -> list[str]:
    """Return the parts at the top of the core that import themselves by way of other parts."""
    top = {path.stem if path.is_file() else path.name for path in (src / "inflight").iterdir()}
    edges: dict[str, set[str]] = {}
    for path, tree in trees.items():
        parts = path.relative_to(src).parts
        if parts[0] != "inflight" or len(parts) < 2 or parts[1] == "__init__.py":
            continue
        own = parts[1].removesuffix(".py")
        names = {name.split(".")[1] for name in imports_of(tree) if name.startswith("inflight.")}
        edges.setdefault(own, set()).update((names & top) - {own})

    def reached(part: str, seen: set[str]) -> set[str]:
        for other in edges.get(part, set()) - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    return sorted(part for part in edges if part in reached(part, set()))


def first_of(*names: str) -> Callable[..., Any]:
    """Return what the first of these modules that exists calls by the name after the colon."""
    for name in names:
        module, _, attribute = name.partition(":")
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        except (ModuleNotFoundError, AttributeError):
            continue
        return found
    raise SystemExit(f"none of {', '.join(names)} exists in this checkout")


def files_of_a_publish(root: Path) -> list[str]:
    """Publish twice, and return the files in which functions ran the second time, when everything is loaded."""
    tiny = "inflight.local.tiny", "inflight.engines.embedded.tiny"
    shape, create, save = (
        first_of(*(f"{module}:{name}" for module in tiny))
        for name in ("TinyShape", "create_tiny_model", "save_tiny_model")
    )
    load = first_of("inflight.local.loading:load_endpoint", "inflight.engines.embedded.loading:load_endpoint")
    from inflight import ModuleWeights, WeightPublisher, publish_weights
    from inflight.weights.transports import make_sender

    entered: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        entered.add(frame.f_code.co_filename)

    threading.setprofile(note)  # in the threads of the publisher and the engine, which start later
    with tempfile.TemporaryDirectory() as directory:
        model = create(shape(), 0)
        save(model, Path(directory))
        source = ModuleWeights(model, version=1)
        endpoint = load(Path(directory), name="embedded")
        with WeightPublisher([endpoint], make_sender("gloo"), run_id="structure") as publisher:
            publish_weights(source, publisher)
            source.version = 2
            entered.clear()
            sys.setprofile(note)
            publish_weights(source, publisher)
            sys.setprofile(None)
            found = frozenset(entered)
    threading.setprofile(None)
    return sorted(str(Path(name).relative_to(root)) for name in found if Path(name).is_relative_to(root / "src"))


def figures_of(root: Path) -> dict[str, Any]:
    """Return the figures of a checkout, whose packages have to be the ones that Python imports."""
    src = root / "src"
    trees = {path: ast.parse(path.read_text()) for path in sorted(src.rglob("*.py"))}
    lines = {path: len(path.read_text().splitlines()) for path in trees}
    tables = sum(len(path.read_text().splitlines()) for path in src.rglob("*.toml"))
    classes = {
        f"{path.relative_to(src)}: {node.name}": num_attributes(node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not is_message(node)
    }
    largest = max(classes, key=lambda name: classes[name])

    def passed(places: tuple[str, ...], word: Callable[[str], bool]) -> list[str]:
        return [
            str(path.relative_to(root))
            for path, tree in trees.items()
            if str(path.relative_to(src)).startswith(places) and any(word(name) for name in named_in(tree))
        ]

    return {
        "lines": sum(lines.values()) + tables,
        "modules": len(lines),
        "top": len([path for path in (src / "inflight").iterdir() if path.suffix == ".py" or any(path.rglob("*.py"))]),
        "mutual": mutual_imports(src, trees),
        "over_400": sorted(str(path.relative_to(src)) for path, count in lines.items() if count > 400),
        "over_450": sorted(str(path.relative_to(src)) for path, count in lines.items() if count > 450),
        "largest_class": largest,
        "largest_class_attributes": classes[largest],
        "classes_over_18": sorted(name for name, count in classes.items() if count > 18),
        "publish_files": files_of_a_publish(root),
        "logprob_files": passed((*LOGPROB, *LOGPROB_OF_TRAINERS), lambda name: "logprob" in name),
        "max_concurrent_files": passed(MAX_CONCURRENT, lambda name: name == "max_concurrent"),
    }


def measured(root: Path) -> dict[str, Any]:
    """Return the figures of a checkout, from a process that imports its packages."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    command = [sys.executable, __file__, "--measure", str(root)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Measure two checkouts and keep their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", nargs="?", help="the commit to compare with")
    parser.add_argument("--test-seconds", nargs=2, type=float, metavar=("BEFORE", "AFTER"), help="time of make test")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(figures_of(arguments.measure.resolve())))
        return
    if arguments.before is None:
        parser.error("name the commit to compare with")
    from results import write_results

    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", str(tree), arguments.before], cwd=ROOT, check=True)
        try:
            rows = {"before": measured(tree), "after": measured(ROOT)}
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    seconds = arguments.test_seconds or (None, None)
    for row, seconds_of_tests in zip(rows.values(), seconds, strict=True):
        row["test_seconds"] = seconds_of_tests
    write_results("structure", {"commit": arguments.before, **rows})
    for name in rows["before"]:
        show = [len(row[name]) if isinstance(row[name], list) else row[name] for row in rows.values()]
        print(f"{name:26} {show[0]!s:>60} {show[1]!s:>60}")


if __name__ == "__main__":
    main()
