"""One assumption about the sources of vLLM, and checks that several kinds of assumptions are made of."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

from tests.engines.vllm_sources.reading import Definition, Sources, constants_in

Check = Callable[[Sources], str | None]


@dataclass(frozen=True)
class Assumption:
    """``problem`` returns what a release's sources lack, None if the assumption holds."""

    kind: str
    name: str
    problem: Check


def exists(dotted: str) -> Check:
    return lambda sources: None if sources.find(dotted) else f"{dotted} is not there"


def has_constant(module: str, value: object) -> Check:
    def problem(sources: Sources) -> str | None:
        tree = sources.module(module)
        return None if tree is not None and value in constants_in(tree) else f"{module} has no constant {value!r}"

    return problem


def field_problem(sources: Sources, field: Definition, name: str) -> str | None:
    """Return a problem unless a class in the annotation of a field has the field ``name``."""
    assert isinstance(field.node, ast.AnnAssign)
    classes = sources.classes_in(field.module, field.node.annotation)
    if any(name in sources.fields(it) for it in classes):
        return None
    return f"no field {name} in {', '.join(it.as_class.name for it in classes if it.as_class) or 'its type'}"
