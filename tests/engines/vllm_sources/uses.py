"""What `inflight_vllm` uses of vLLM, read from the adapter's own syntax trees, so that a new use needs no new entry.

The types of objects that vLLM passes in are not in the adapter's code. `RECEIVERS` states them once.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

ADAPTER = Path(__file__).parents[3] / "src" / "inflight_vllm"

_CORE = "vllm.v1.engine.core.EngineCoreProc"
_WORKER = "vllm.v1.worker.gpu_worker.Worker"
_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
_MODEL = "vllm.config.model.ModelConfig"
_CONFIG = "vllm.config.vllm.VllmConfig"
_LAYER_INFO = "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo"
RECEIVERS: Mapping[str, Mapping[str, str]] = {
    "engine_core": {"core": _CORE, "core.model_executor": "vllm.v1.executor.abstract.Executor"},
    "streamed_versions": {"state": "vllm.v1.engine.output_processor.RequestState"},
    "stop_strings": {"self": "vllm.v1.engine.detokenizer.FastIncrementalDetokenizer"},
    "transfer_engine": {
        "worker": _WORKER,
        "vllm_config": _CONFIG,
        "self.model_config": _MODEL,
        "parallel": "vllm.config.parallel.ParallelConfig",
    },
    "drafting": {
        "vllm_config": _CONFIG,
        "vllm_config.model_config": _MODEL,
        "vllm_config.speculative_config": "vllm.config.speculative.SpeculativeConfig",
        "worker": _WORKER,
        "runner": _RUNNER,
        "self._runner": _RUNNER,
        "batch": "vllm.v1.worker.gpu_input_batch.InputBatch",
        "self._runner.requests[request_id]": "vllm.v1.worker.gpu_input_batch.CachedRequestState",
        "params": "vllm.sampling_params.SamplingParams",
    },
    "reloading": {
        "info": _LAYER_INFO,
        "self._model_config": _MODEL,
        "attention": "vllm.model_executor.layers.attention.Attention",
        "method": "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase",
        "it": "vllm.model_executor.layers.fused_moe.fused_moe_method_base.FusedMoEMethodBase",
    },
    "ready_layers": {"module.quant_method": "vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase"},
    "traced_loads": {"get_layerwise_info(layer.module)": _LAYER_INFO},
}
"""For each module of the adapter, the expressions whose value vLLM makes, and their classes."""


@dataclass(frozen=True)
class Import:
    """``from vllm.a import b``, as ``vllm.a.b``."""

    module: str
    dotted: str


@dataclass(frozen=True)
class Access:
    """An attribute of a module or class of vLLM; ``is_stored`` if the adapter sets it."""

    module: str
    owner: str
    name: str
    is_stored: bool = False
    replacement: ast.AST | None = None
    """The function of the adapter that is stored."""


@dataclass(frozen=True)
class Called:
    """A call of a function of vLLM, or of a method of one of its classes."""

    module: str
    dotted: str
    node: ast.Call


@dataclass(frozen=True)
class Subclass:
    """A class of the adapter with a base in vLLM."""

    module: str
    base: str
    node: ast.ClassDef


@dataclass(frozen=True)
class Asked:
    """A call of a route: its query and the keys of its body. ``body`` is None if only running code can tell."""

    module: str
    method: str
    path: str
    query: frozenset[tuple[str, str]]
    body: frozenset[str] | None


class AdapterModule:
    """One module of the adapter."""

    def __init__(self, path: Path) -> None:
        self.name = path.stem
        self.tree = ast.parse(path.read_text())
        self._names: dict[str, str] = {}
        self._constants: dict[str, object] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                self._names |= {it.asname or it.name: f"{node.module}.{it.name}" for it in node.names}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if isinstance(node.value, ast.Constant):
                    self._constants[node.targets[0].id] = node.value.value
                elif isinstance(node.value, ast.Dict):
                    self._constants[node.targets[0].id] = [_constant(it) for it in node.value.values]

    # ------------------------------------------------------------------------------------------------- Python of vLLM

    def imports(self) -> Iterator[Import]:
        yield from (Import(self.name, dotted) for dotted in self._names.values())

    def owner_of(self, expression: ast.expr) -> str | None:
        """Return the class or module of vLLM that an expression is or whose instance it is, None if it is not one."""
        text = ast.unparse(expression)
        return RECEIVERS.get(self.name, {}).get(text) or self._names.get(text)

    def accesses(self) -> Iterator[Access]:
        functions = {it.name: it for it in ast.walk(self.tree) if isinstance(it, ast.FunctionDef)}
        for node in ast.walk(self.tree):
            match node:
                case ast.Attribute(value=value, attr=name) if (owner := self.owner_of(value)) is not None:
                    if isinstance(node.ctx, ast.Load):
                        yield Access(self.name, owner, name)
                case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]) if (
                    owner := self.owner_of(value)
                ) is not None:
                    yield Access(self.name, owner, name)
                case ast.Assign(targets=[ast.Attribute(value=value, attr=name)], value=stored) if (
                    owner := self.owner_of(value)
                ) is not None:
                    replacement = functions.get(stored.id) if isinstance(stored, ast.Name) else None
                    yield Access(self.name, owner, name, is_stored=True, replacement=replacement)

    def calls(self) -> Iterator[Called]:
        for node in ast.walk(self.tree):
            match node:
                case ast.Call(func=ast.Name(id=name)) if name in self._names:
                    yield Called(self.name, self._names[name], node)
                case ast.Call(func=ast.Attribute(value=value, attr=name)) if (
                    owner := self.owner_of(value)
                ) is not None:
                    yield Called(self.name, f"{owner}.{name}", node)
        for subclass in self.subclasses():
            for node in ast.walk(subclass.node):
                match node:
                    case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name)):
                        yield Called(self.name, f"{subclass.base}.{name}", node)

    def subclasses(self) -> Iterator[Subclass]:
        for node in ast.walk(self.tree):
            for base in node.bases if isinstance(node, ast.ClassDef) else ():
                value = base.value if isinstance(base, ast.Subscript) else base
                if (dotted := self._names.get(ast.unparse(value))) is not None:
                    assert isinstance(node, ast.ClassDef)
                    yield Subclass(self.name, dotted, node)

    def named_in_strings(self) -> Iterator[str]:
        """Yield the modules and functions of vLLM that strings name, except the names of loggers."""
        loggers = {
            id(it.args[0])
            for it in ast.walk(self.tree)
            if isinstance(it, ast.Call) and ast.unparse(it.func) == "logging.getLogger"
        }
        for node in ast.walk(self.tree):
            text = self._text(node)
            if text is None or id(node) in loggers or not text.startswith("vllm."):
                continue
            if all(it.isidentifier() for it in text.split(".")):
                yield text

    def rpc_methods(self) -> Iterator[str]:
        """Yield the methods of vLLM's workers that the adapter calls by name through the executor."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Call(func=ast.Attribute(attr="collective_rpc"), args=[ast.Constant(value=str(name)), *_]):
                    yield name

    def _text(self, node: ast.AST) -> str | None:
        """Return the value of a string, also of one that is formatted from constants of the module."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Name):
            value = self._constants.get(node.id)
            return value if isinstance(value, str) else None
        if not isinstance(node, ast.JoinedStr):
            return None
        parts = [self._text(it.value if isinstance(it, ast.FormattedValue) else it) for it in node.values]
        return None if None in parts else "".join(it for it in parts if it is not None)

    # ------------------------------------------------------------------------------------------------------ its routes

    def routes(self, constants: Mapping[str, object]) -> Iterator[Asked]:
        """Yield the calls of routes. ``constants`` are those of all modules of the adapter."""
        for function in ast.walk(self.tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for node in _own_nodes(function):
                match node:
                    case ast.Call(func=ast.Attribute(value=value, attr="get" | "post" | "request" | "ask" as how)) if (
                        ast.unparse(value) in ("routes", "self._routes", "self._requests")
                    ):
                        method = {"get": "GET", "post": "POST", "request": "POST"}.get(how)
                        arguments = [*node.args]
                        if method is None:
                            method = str(_constant(arguments.pop(0)))
                        path, query = _address(arguments[0], constants)
                        body = self._body(arguments[1] if len(arguments) > 1 else None, function)
                        yield Asked(self.name, method, path, query, body)
                    case ast.keyword(arg="label_path" | "liveness_path", value=ast.Constant(value=str(path))):
                        yield Asked(self.name, "GET", path, frozenset(), frozenset())

    def _body(self, body: ast.expr | None, function: ast.AST) -> frozenset[str] | None:
        match body:
            case None | ast.Constant(value=None):
                return frozenset()
            case ast.Dict(keys=keys):
                return frozenset(str(_constant(key)) for key in keys if key is not None)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                parts = [self._body(it, function) for it in (left, right)]
                return None if None in parts else frozenset().union(*(it for it in parts if it is not None))
            case ast.Call(func=ast.Attribute(attr="model_dump"), keywords=[ast.keyword(arg="include", value=included)]):
                return frozenset(str(_constant(it)) for it in included.elts) if isinstance(included, ast.Set) else None
            case ast.Name(id=name):
                for node in ast.walk(function):
                    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
                        return self._body(node.value, function)
        return None

    def keys_read(self) -> Iterator[str]:
        """Yield the strings by which mappings are indexed: fields of vLLM's answers, and others."""
        for node in ast.walk(self.tree):
            match node:
                case ast.Subscript(slice=ast.Constant(value=str(key)), ctx=ast.Load()):
                    yield key
                case ast.Call(func=ast.Attribute(attr="get", value=value), args=[ast.Constant(value=str(key)), *_]) if (
                    ast.unparse(value) not in ("routes", "self._routes", "self._requests")
                ):
                    yield key

    @property
    def constants(self) -> Mapping[str, object]:
        return self._constants


@functools.cache
def adapter_modules() -> tuple[AdapterModule, ...]:
    """Return the modules of the adapter; `four_phases` is for servers of other projects."""
    return tuple(AdapterModule(path) for path in sorted(ADAPTER.glob("*.py")) if path.stem != "four_phases")


@functools.cache
def asked_routes() -> tuple[Asked, ...]:
    """Return every call of a route in the adapter."""
    modules = adapter_modules()
    constants = {name: value for it in modules for name, value in it.constants.items()}
    return tuple(asked for it in modules for asked in it.routes(constants))


def _constant(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions in it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _own_nodes(child)


def _address(path: ast.expr, constants: Mapping[str, object]) -> tuple[str, frozenset[tuple[str, str]]]:
    """Return a path and all queries that it may have."""
    match path:
        case ast.Constant(value=str(text)):
            texts = [text]
        case ast.Name(id=name):
            texts = [str(constants[name])]
        case ast.JoinedStr(
            values=[ast.Constant(value=str(start)), ast.FormattedValue(value=ast.Subscript(value=table))]
        ):
            values = constants[ast.unparse(table)]
            assert isinstance(values, list)
            texts = [f"{start}{value}" for value in values]
        case _:
            raise AssertionError(f"the checker cannot tell which route this is: {ast.unparse(path)}")
    queries = {pair for text in texts for pair in parse_qsl(text.partition("?")[2])}
    return texts[0].partition("?")[0], frozenset(queries)
