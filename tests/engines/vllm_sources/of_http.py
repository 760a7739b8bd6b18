"""Assumptions about the routes of vLLM: which there are, what they take, and what they answer."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from inflight.engines.requests import SentRequest
from inflight.wire import GenerateRequest, PromptImage, SamplingParams, ScoreRequest
from inflight_vllm import requests
from tests.engines.test_vllm_requests import CAN
from tests.engines.vllm_sources.assumption import Assumption, Check, field_problem
from tests.engines.vllm_sources.reading import Route, Sources, constants_in
from tests.engines.vllm_sources.uses import Asked, asked_routes

FROM_FASTAPI = frozenset({"/openapi.json"})
"""Routes that are not declared in vLLM."""
_PROTOCOL = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
READ: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    requests.GENERATE: (
        (f"{_PROTOCOL}.GenerateTokensResponse", f"{_PROTOCOL}.GenerateResponse"),  # the second until 0.31
        (
            *("choices.index", "choices.token_ids", "choices.finish_reason", "choices.logprobs.content.logprob"),
            *("choices.weight_versions.version", "choices.weight_versions.start", "choices.weight_versions.end"),
            *("prompt_logprobs.logprob", "prompt_token_ids", "mm_placeholders.offset", "mm_placeholders.length"),
            "metrics.speculative_decoding.num_spec_steps",
            "metrics.speculative_decoding.num_accepted_draft_tokens",
        ),
    ),
    f"{requests.GENERATE}, streamed": (
        (f"{_PROTOCOL}.GenerateTokensStreamResponse", f"{_PROTOCOL}.GenerateStreamResponse"),  # the second until 0.31
        (
            *("choices.index", "choices.token_ids", "choices.finish_reason", "choices.logprobs.content.logprob"),
            *("choices.weight_versions.version", "choices.weight_versions.start", "choices.weight_versions.end"),
            *("prompt_token_ids", "mm_placeholders.offset", "mm_placeholders.length"),
        ),
    ),
    "/v1/models": (
        ("vllm.entrypoints.serve.engine.protocol.ModelList",),
        ("data.id", "data.root", "data.max_model_len"),
    ),
    "/server_info": (
        ("vllm.config.vllm.VllmConfig",),
        (
            *("model_config.dtype", "model_config.logprobs_mode", "model_config.enable_sleep_mode"),
            *("model_config.multimodal_config.language_model_only", "model_config.max_logprobs"),
            *("scheduler_config.max_num_seqs", "scheduler_config.enable_chunked_prefill", "device_config.device"),
            *("parallel_config.data_parallel_size", "weight_transfer_config.backend", "speculative_config.model"),
            "observability_config.per_request_spec_decode_metrics",
        ),
    ),
    "/detokenize": (("vllm.entrypoints.serve.tokenize.protocol.DetokenizeResponse",), ("prompt",)),
    "/v1/chat/completions/render": (
        (f"{_PROTOCOL}.GenerateRequest",),
        ("token_ids", "features.mm_placeholders.offset", "features.mm_placeholders.length"),
    ),
}
"""Routes that answer with a class: its name, the first that a release has, and the fields that the adapter reads."""
READ_LITERALLY = {
    "/version": ("version",),
    "/server_info": ("vllm_config",),
    "/is_paused": ("is_paused",),
    "/weight_info": ("weight_version",),
    "/get_world_size": ("world_size",),
    "/collective_rpc": ("results",),
    "/wake_up": ("status",),
}
"""Routes that answer with a dictionary, and the keys that the adapter reads."""


def http_assumptions() -> Iterator[Assumption]:
    """Yield the assumptions about routes, some of them several times."""
    yield from _routes()
    yield from _sent()
    yield from _read()


def _routes() -> Iterator[Assumption]:
    for asked in asked_routes():
        if asked.path not in FROM_FASTAPI:
            yield Assumption("route", f"{asked.method} {asked.path}", _on_route(asked, lambda _sources, _route: None))


def _on_route(asked: Asked, check: Callable[[Sources, Route], str | None]) -> Check:
    """Return a check that holds if it does for one of the functions that answer a route."""

    def problem(sources: Sources) -> str | None:
        routes = sources.routes.get((asked.method, asked.path), [])
        problems = [check(sources, route) for route in routes]
        return None if None in problems else next(iter(problems), f"no route {asked.method} {asked.path}")

    return problem


def _sent() -> Iterator[Assumption]:
    """The parameters and fields that the adapter sends, and the values of those that only take some."""
    for asked in asked_routes():
        where = f"{asked.method} {asked.path}"
        bodies: list[dict[str, Any]] = [dict.fromkeys(asked.body or ())]
        if asked.body is None:
            bodies = _generated_bodies()
        assert asked.body is not None or asked.path == requests.GENERATE, f"unknown body of {asked}"
        for name, value in sorted(asked.query):
            yield Assumption("request field", f"{where}: {name}", _on_route(asked, _takes(name)))
            if value not in ("true", "false") and not value.isdecimal():
                yield Assumption("request value", f"{where}: {name}={value}", _on_route(asked, _accepts(name, value)))
        for body in bodies:
            for name, content in body.items():
                yield Assumption("request field", f"{where}: {name}", _on_route(asked, _takes(name)))
                for inner in content if isinstance(content, dict) else ():
                    label = f"{where}: {name}.{inner}"
                    yield Assumption("request field", label, _on_route(asked, _takes(name, inner)))


def _takes(name: str, inner: str | None = None) -> Callable[[Sources, Route], str | None]:
    def check(sources: Sources, route: Route) -> str | None:
        arguments = {it.arg: it for it in (*route.function.args.args, *route.function.args.kwonlyargs)}
        if name in arguments or any(name in constants_in(it) for it in route.function.body):
            return None
        for argument in arguments.values():
            for cls in sources.classes_in(route.module, argument.annotation):
                fields = sources.fields(cls)
                if name in fields:
                    return None if inner is None else field_problem(sources, fields[name], inner)
        return f"{route.function.name} in {route.module} takes no {name}"

    return check


def _accepts(name: str, value: str) -> Callable[[Sources, Route], str | None]:
    def check(sources: Sources, route: Route) -> str | None:
        arguments = [*route.function.args.args, *route.function.args.kwonlyargs]
        annotation = next((it.annotation for it in arguments if it.arg == name), None)
        allowed = sources.literals_in(route.module, annotation)
        return None if value in allowed else f"{name} is one of {sorted(allowed)}, not {value!r}"

    return check


def _generated_bodies() -> list[dict[str, Any]]:
    """Return bodies of requests that have every field that the adapter ever sends."""
    can = CAN.model_copy(update={"drafts": True, "images": True})
    image = PromptImage(url="data:image/png;base64,AAAA", start=1, num_tokens=2)
    request = GenerateRequest(
        request_id="a",
        prompt_token_ids=(1, 2, 2, 3),
        images=(image,),
        num_continued=1,
        sampling=SamplingParams(seed=1, stop=("a",), stop_token_ids=(1,), max_tokens=4),
    )
    asked = {0: SentRequest("name", cache_key="key")}
    scored = ScoreRequest(request_id="a", token_ids=(1, 2, 3), top_k=1)
    bodies = [body | {"stream": True} for body in requests.bodies_of(request, can, asked)]
    return [*bodies, requests.scoring_body_of(scored, can, asked[0])]


def _read() -> Iterator[Assumption]:
    for path, (classes, fields) in READ.items():
        for field in fields:
            yield Assumption("answer field", f"{path}: {field}", _answers(classes, field))
    for asked in asked_routes():
        for key in READ_LITERALLY.get(asked.path, ()):
            yield Assumption("answer field", f"{asked.path}: {key}", _on_route(asked, _answers_literally(key)))


def _answers(classes: Sequence[str], field: str) -> Check:
    def problem(sources: Sources) -> str | None:
        found = [cls for it in classes if (cls := sources.find(it)) is not None and cls.as_class][:1]
        for name in field.split("."):
            fields = [fields[name] for it in found if name in (fields := sources.fields(it))]
            if not fields:
                return f"no field {name} in {', '.join(it.as_class.name for it in found if it.as_class) or 'its type'}"
            annotations = [(it.module, it.node.annotation) for it in fields if isinstance(it.node, ast.AnnAssign)]
            found = [cls for module, annotation in annotations for cls in sources.classes_in(module, annotation)]
        return None

    return problem


def _answers_literally(key: str) -> Callable[[Sources, Route], str | None]:
    def check(_: Sources, route: Route) -> str | None:
        keys = {
            it.value
            for node in ast.walk(route.function)
            if isinstance(node, ast.Dict)
            for it in node.keys
            if isinstance(it, ast.Constant)
        }
        return None if key in keys else f"{route.function.name} in {route.module} answers without {key}"

    return check
