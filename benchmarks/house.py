"""Measures the source: its size, its largest class, and the files that one publish and one logprob pass through.

    PYTHONPATH=ROOT/src python benchmarks/house.py ROOT LABEL [SECONDS]

measures the checkout at ROOT, and keeps the figures in benchmarks/results/house.json under LABEL, with the seconds that
`make test` took there.

Lines are those of every Python and TOML file under src. A class's attributes are its annotated fields and what its
methods assign to ``self``. A publish is one call of `publish_weights` over gloo to an embedded endpoint here:
it passes through the files of src in which a function ran meanwhile. A logprob passes through the files between the
engine that draws the token and the loss that trains on it whose code has a name with ``logprob`` in it.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from inflight.engines.embedded.loading import load_endpoint
from inflight.engines.embedded.tiny import TinyShape, create_tiny_model, save_tiny_model
from inflight.weights.send.module import ModuleWeights
from inflight.weights.send.publisher import WeightPublisher, publish_weights
from inflight.weights.transports import make_sender
from results import DIRECTORY, read_results, write_results

ON_A_LOGPROBS_WAY = (
    "inflight/engines/embedded/",
    "inflight/http/",
    "inflight/wire.py",
    "inflight/types.py",
    "inflight/rollouts/",
    "inflight/run/",
    "inflight/losses/",
    "inflight_fsdp/",
)
"""Where the files of a run are that pass a logprob on."""


def num_attributes(node: ast.ClassDef) -> int:
    """Return how many attributes the instances of a class have of its own."""
    names = {
        part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            names |= {part.attr} if ast.unparse(part.value) == "self" else set()
    return len(names)


def names_a_logprob(tree: ast.Module) -> bool:
    """Return whether code, which docstrings are not, names one."""
    words = (
        getattr(node, name)
        for node in ast.walk(tree)
        for name in ("id", "attr", "arg", "name")
        if isinstance(getattr(node, name, None), str)
    )
    return any("logprob" in word for word in words)


def files_of_a_publish(root: Path) -> list[str]:
    """Publish twice, and return the files in which functions ran the second time, when everything is loaded."""
    entered: set[str] = set()

    def note(frame: Any, event: str, _: object) -> None:
        entered.add(frame.f_code.co_filename)

    threading.setprofile(note)  # in the threads of the publisher and the engine, which start later
    with tempfile.TemporaryDirectory() as directory:
        model = create_tiny_model(TinyShape(), 0)
        save_tiny_model(model, Path(directory))
        endpoint = load_endpoint(Path(directory), name="embedded")
        source = ModuleWeights(model, version=1)
        with WeightPublisher([endpoint], make_sender("gloo"), run_id="house") as publisher:
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
    trees = {path: ast.parse(path.read_text()) for path in sorted((root / "src").rglob("*.py"))}
    lines = {path: len(path.read_text().splitlines()) for path in trees}
    classes = {
        f"{path.relative_to(root)}: {node.name}": num_attributes(node)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    largest = max(classes, key=lambda name: classes[name])
    on_the_way = [
        str(path.relative_to(root))
        for path, tree in trees.items()
        if any(part in str(path.relative_to(root / "src")) for part in ON_A_LOGPROBS_WAY) and names_a_logprob(tree)
    ]
    return {
        "lines": sum(lines.values())
        + sum(len(path.read_text().splitlines()) for path in (root / "src").rglob("*.toml")),
        "modules": len(lines),
        "modules_over_400_lines": sum(count > 400 for count in lines.values()),
        "largest_class": largest,
        "largest_class_attributes": classes[largest],
        "publish_files": files_of_a_publish(root),
        "logprob_files": on_the_way,
    }


def main(root: Path, label: str, seconds: str = "") -> None:
    """Measure a checkout and keep its figures beside those of others."""
    rows = read_results("house")["rows"] if (DIRECTORY / "house.json").exists() else []
    row = {"label": label, "test_seconds": float(seconds) if seconds else None, **figures_of(root.resolve())}
    write_results("house", [*(other for other in rows if other["label"] != label), row])
    print(json.dumps(row, indent=2))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
