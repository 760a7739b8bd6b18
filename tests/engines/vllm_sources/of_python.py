"""Assumptions about vLLM's Python: what the plug-in imports, reads, calls and replaces, and what vLLM calls in it."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from inflight_vllm import flags, requests
from tests.engines.vllm_sources.assumption import Assumption, Check, exists, has_constant
from tests.engines.vllm_sources.reading import (
    Sources,
    binding_of,
    call_problem,
    constants_in,
    is_abstract,
    parameters_of,
)
from tests.engines.vllm_sources.uses import Access, Subclass, adapter_modules

OWN_METHODS = frozenset({"can_stage_while_sampling", "status"})
"""Public methods of the adapter's subclasses that vLLM does not call."""
OWN_ATTRIBUTES = "inflight_"
"""Prefix of the attributes that the adapter adds to classes of vLLM."""
ENGINE_CALLS = frozenset(
    {"init_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update", "shutdown"}
)
"""Methods of the adapter's weight transfer engine that vLLM's worker calls."""
LOADED_IN = ("vllm.engine.arg_utils", "vllm.v1.engine.core", "vllm.v1.worker.worker_base")
"""Modules of processes in which the adapter's plug-in has to be loaded."""
MEMBERS = (
    "vllm.model_executor.layers.linear.LinearBase.quant_method",
    "vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding.quant_method",
    "vllm.model_executor.models.llama.LlamaForCausalLM.load_weights",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.get_model",
)
"""What the adapter uses of layers and models, which it knows only as modules of torch."""
KERNELS = {
    "expand_kernel": ("output_ptr", "input_ptr", "cu_num_tokens_ptr", "replace_from", "replace_to", "MAX_NUM_TOKENS"),
    "rejection_random_sample_kernel": (
        "output_token_ids_ptr",
        "cu_num_draft_tokens_ptr",
        "draft_token_ids_ptr",
        "draft_probs_ptr",
        "target_probs_ptr",
        "bonus_token_ids_ptr",
        "recovered_token_ids_ptr",
        "uniform_probs_ptr",
    ),
    "sample_recovered_tokens_kernel": (
        "output_token_ids_ptr",
        "cu_num_draft_tokens_ptr",
        "draft_token_ids_ptr",
        "draft_probs_ptr",
        "target_probs_ptr",
        "inv_q_ptr",
    ),
}
"""First parameters of the kernels that `inflight_vllm.verification` replaces, in the order in which it takes them."""
CONSTANTS: Mapping[str, tuple[object, ...]] = {
    "vllm.entrypoints.scale_out.token_in_token_out.serving": (requests._PREFIX, -requests._FLOOR),
    "vllm.utils.ompmultiprocessing": ("nobind",),
    "vllm.entrypoints.serve.dev.sleep.api_router": ("awake",),
}
"""Values that the adapter compares with, or relies on, and the modules that have them as constants."""
REFUSAL = requests.REFUSED_FOR_NOW
"""The error type of requests that may be sent again, which `inflight_vllm.requests` recognises."""


def python_assumptions() -> Iterator[Assumption]:
    """Yield the assumptions about Python, some of them several times."""
    yield from _imports()
    yield from _attributes()
    yield from _calls()
    for module in adapter_modules():
        for subclass in module.subclasses():
            yield from _overrides(subclass)
    yield from _callbacks()
    yield from _entry_points()


# ------------------------------------------------------------------------------------------------------------ Python


def _imports() -> Iterator[Assumption]:
    for module in adapter_modules():
        yield from (Assumption("import", it.dotted, exists(it.dotted)) for it in module.imports())
        yield from (Assumption("import", name, exists(name)) for name in module.named_in_strings())


def _attributes() -> Iterator[Assumption]:
    for module in adapter_modules():
        for access in module.accesses():
            name = f"{access.owner}.{access.name}"
            if access.name.startswith(OWN_ATTRIBUTES):
                yield Assumption("attribute", f"{name} is free", _is_free(name))
                continue
            yield Assumption("attribute", name, exists(name))
            if access.is_stored and isinstance(access.replacement, ast.FunctionDef):
                yield Assumption("override", f"{name} is replaceable", _replaceable(access))
        for method in (name for name in module.rpc_methods() if not name.startswith(OWN_ATTRIBUTES)):
            for worker in ("vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker"):
                yield Assumption("attribute", f"{worker}.{method}", exists(f"{worker}.{method}"))
    yield from (Assumption("attribute", name, exists(name)) for name in MEMBERS)
    for kernel, names in KERNELS.items():
        yield Assumption("override", f"{kernel}({', '.join(names)})", _kernel(kernel, names))
    yield Assumption("constant", f"{REFUSAL!r} if requests can be refused for now", _refuses)
    for owner, values in CONSTANTS.items():
        for value in values:
            yield Assumption("constant", f"{value!r} in {owner}", has_constant(owner, value))


def _refuses(sources: Sources) -> str | None:
    """vLLM 0.32 has no such refusals."""
    if sources.find("vllm.exceptions.RetryableRequestError") is None:
        return None
    return has_constant("vllm.entrypoints.serve.exception_handling.error_response", REFUSAL)(sources)


def _is_free(name: str) -> Check:
    return lambda sources: f"{name} exists already" if sources.find(name) else None


def _kernel(name: str, wanted: Sequence[str]) -> Check:
    def problem(sources: Sources) -> str | None:
        found = sources.find(f"vllm.v1.sample.rejection_sampler.{name}")
        if found is None or found.as_function is None:
            return f"there is no kernel {name}"
        names = parameters_of(found.as_function)
        is_whole = name == "expand_kernel"  # the other replacements pass on what follows
        right = names == list(wanted) if is_whole else names[: len(wanted)] == list(wanted)
        return None if right else f"its parameters are {', '.join(names)}"

    return problem


def _replaceable(access: Access) -> Check:
    def problem(sources: Sources) -> str | None:
        found = sources.find(f"{access.owner}.{access.name}")
        if found is None or found.as_function is None:
            return f"{access.owner}.{access.name} is not a function"
        assert isinstance(access.replacement, ast.FunctionDef)
        return _signature_problem(access.replacement, found.as_function)

    return problem


def _signature_problem(ours: ast.FunctionDef, theirs: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return why our function cannot stand for theirs, None if it can. ``self`` may have another name."""
    if isinstance(theirs, ast.AsyncFunctionDef) != isinstance(ours, ast.AsyncFunctionDef):
        return "one of them is async"
    if binding_of(theirs) != binding_of(ours):
        return f"theirs is a {binding_of(theirs)}"
    mine, wanted = parameters_of(ours), parameters_of(theirs)
    if ours.args.vararg is not None:
        return None if ours.args.kwarg is not None else "ours takes no keywords"
    if mine[1:] != wanted[1:]:
        return f"the parameters are ({', '.join(wanted)}), not ({', '.join(mine)})"
    keywords = {it.arg for it in theirs.args.kwonlyargs} - {it.arg for it in ours.args.kwonlyargs}
    return f"there is a new parameter {', '.join(sorted(keywords))}" if keywords else None


def _calls() -> Iterator[Assumption]:
    for module in adapter_modules():
        for called in module.calls():
            text = ", ".join(
                [*("*" if isinstance(it, ast.Starred) else "_" for it in called.node.args)]
                + [f"{it.arg}=" if it.arg else "**" for it in called.node.keywords]
            )
            yield Assumption("call", f"{called.dotted}({text})", _callable(called.dotted, called.node))


def _callable(dotted: str, call: ast.Call) -> Check:
    def problem(sources: Sources) -> str | None:
        found = sources.find(dotted)
        if found is None or found.as_function is None:
            return f"{dotted} is not a function there"
        owner = sources.find(dotted.rpartition(".")[0])
        is_bound = owner is not None and owner.as_class is not None and binding_of(found.as_function) != "staticmethod"
        return call_problem(found.as_function, call, is_bound=is_bound)

    return problem


# --------------------------------------------------------------------------------------------------- what vLLM calls


def _overrides(subclass: Subclass) -> Iterator[Assumption]:
    """The methods and attributes that a subclass overrides or inherits, and the abstract methods that it must have."""
    methods = {it.name: it for it in subclass.node.body if isinstance(it, ast.FunctionDef)}
    attributes = {
        it.targets[0].id
        for it in subclass.node.body
        if isinstance(it, ast.Assign) and isinstance(it.targets[0], ast.Name) and not it.targets[0].id.startswith("_")
    }
    for name, method in methods.items():
        if not name.startswith("_") and name not in OWN_METHODS:
            yield Assumption("override", f"{subclass.base}.{name}", _overridden(subclass.base, method))
    for name in attributes:
        yield Assumption("override", f"{subclass.base}.{name}", exists(f"{subclass.base}.{name}"))
    used = {
        (it.attr, isinstance(it.ctx, ast.Store))
        for it in ast.walk(subclass.node)
        if isinstance(it, ast.Attribute) and isinstance(it.value, ast.Name) and it.value.id == "self"
    }
    own = {*methods, *attributes, *(name for name, is_stored in used if is_stored)}
    for name in sorted({name for name, _ in used} - own):
        yield Assumption("attribute", f"{subclass.base}.{name} is inherited", exists(f"{subclass.base}.{name}"))
    for name in sorted(own - {"__init__"}):
        if name.startswith("_"):
            yield Assumption("attribute", f"{subclass.base}.{name} is free", _is_free(f"{subclass.base}.{name}"))

    def unmet(sources: Sources) -> str | None:
        found = sources.find(subclass.base)
        if found is None or found.as_class is None:
            return f"{subclass.base} is not a class there"
        members = sources.members(found).items()
        abstract = {name for name, it in members if it.as_function and is_abstract(it.as_function)}
        return f"abstract: {', '.join(sorted(abstract - set(methods)))}" if abstract - set(methods) else None

    yield Assumption("override", f"every abstract method of {subclass.base}", unmet)


def _overridden(base: str, ours: ast.FunctionDef) -> Check:
    def problem(sources: Sources) -> str | None:
        found = sources.find(f"{base}.{ours.name}")
        if found is None or found.as_function is None:
            return f"{base} has no method {ours.name}"
        return _signature_problem(ours, found.as_function)

    return problem


def _entry_points() -> Iterator[Assumption]:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    for group in project["entry-points"]:
        if group.startswith("vllm."):
            yield Assumption("entry point", f"group {group}", has_constant("vllm.plugins", group))
            for module in LOADED_IN:
                yield Assumption("entry point", f"{group} in {module}", _loads_plugins(module))


def _loads_plugins(module: str) -> Check:
    def problem(sources: Sources) -> str | None:
        loader = sources.find("vllm.plugins.load_general_plugins")
        tree = sources.module(module)
        if loader is None or tree is None:
            return f"vllm.plugins.load_general_plugins or {module} is not there"
        calls = {it.func.id for it in ast.walk(tree) if isinstance(it, ast.Call) and isinstance(it.func, ast.Name)}
        return None if "load_general_plugins" in calls else f"{module} loads no plug-ins"

    return problem


def _callbacks() -> Iterator[Assumption]:
    """Calls in vLLM of methods that the adapter defines: of its engine of weight transfers, and of its proposer."""
    (engine,) = (it.node for module in adapter_modules() for it in module.subclasses())
    for path in ("gpu_worker", "cpu_worker"):
        yield Assumption("callback", f"vllm.v1.worker.{path} on weight_transfer_engine", _engine_calls(path, engine))
    (drafting,) = (it for it in adapter_modules() if it.name == "drafting")
    name = flags.PROPOSER.rpartition(".")[2]
    (proposer,) = (it for it in drafting.tree.body if isinstance(it, ast.ClassDef) and it.name == name)
    for method in ("__init__", "propose", "load_model"):
        yield Assumption("callback", f"vLLM on the proposer: {method}", _proposer_calls(method, proposer))


def _engine_calls(path: str, engine: ast.ClassDef) -> Check:
    def problem(sources: Sources) -> str | None:
        tree = sources.module(f"vllm.v1.worker.{path}")
        if tree is None:
            return "the module is not there"
        calls = list(_calls_on(tree, "weight_transfer_engine"))
        names = {it.func.attr for it in calls if isinstance(it.func, ast.Attribute)}
        if path == "gpu_worker" and (never := ENGINE_CALLS - names):  # the worker for CPUs is a subclass
            return f"it never calls {', '.join(sorted(never))}"
        return next((it for call in calls if (it := _call_on_ours(engine, call))), None)

    return problem


def _proposer_calls(method: str, proposer: ast.ClassDef) -> Check:
    def problem(sources: Sources) -> str | None:
        if method == "__init__":
            made = sources.find("vllm.v1.spec_decode.custom_class_proposer.create_custom_proposer")
            nodes = ast.walk(made.node) if made is not None else iter(())
            calls = [it for it in nodes if isinstance(it, ast.Call) and ast.unparse(it.func) == "user_class"]
        else:
            calls = [
                it for it in _runner_calls(sources) if isinstance(it.func, ast.Attribute) and it.func.attr == method
            ]
        if not calls:
            return "no such call was found"
        (function,) = (it for it in proposer.body if isinstance(it, ast.FunctionDef) and it.name == method)
        return next((it for call in calls if (it := call_problem(function, call, is_bound=True))), None)

    return problem


def _runner_calls(sources: Sources) -> Iterator[ast.Call]:
    """Yield the calls on a proposer that vLLM makes for the method ``custom_class``, or for any."""
    for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.cpu_model_runner"):
        tree = sources.module(module)
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.If) and "custom_class" in constants_in(node.test):
                yield from (it for statement in node.body for it in ast.walk(statement) if isinstance(it, ast.Call))
        for call in _calls_on(tree, "drafter") if tree is not None else ():
            if isinstance(call.func, ast.Attribute) and call.func.attr == "load_model":
                yield call


def _calls_on(tree: ast.Module, attribute: str) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr=found) | ast.Name(id=found))) if (
                found == attribute
            ):
                yield node


def _call_on_ours(engine: ast.ClassDef, call: ast.Call) -> str | None:
    assert isinstance(call.func, ast.Attribute)
    for method in engine.body:
        if isinstance(method, ast.FunctionDef) and method.name == call.func.attr:
            problem = call_problem(method, call, is_bound=True)
            return None if problem is None else f"{method.name} of the adapter {problem}"
    return None
