"""The OpenAPI document of the contract, derived from the routes and the wire models.

``python -m inflight.http.openapi`` prints it.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from inflight.base.transport_registry import installed_transports
from inflight.http.routes import REFUSED_STATUSES, ROUTES, STATUS_OF_CODE, Route
from inflight.wire import PROTOCOL_VERSION, ErrorBody, TransportBody

_REF = "#/components/schemas/{model}"


@functools.cache
def openapi_document() -> dict[str, Any]:
    """Return the document as JSON-compatible values, computed once and cached."""
    models = {model for route in ROUTES for model in (*_requests(route), route.response) if model is not None}
    models.add(ErrorBody)
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=_REF)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "inflight inference contract",
            "version": str(PROTOCOL_VERSION),
            "description": "Token-in, token-out generation whose weights change between two token steps.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {name: {"type": "http", "scheme": "bearer"} for name in ("control", "generation")},
        },
    }


def _operation(route: Route[Any]) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success"}
    if route.response is not None:
        success["content"] = {"application/json": {"schema": {"$ref": _REF.format(model=route.response.__name__)}}}
    else:
        success["content"] = {"text/plain": {"schema": {"type": "string"}}}
    failure = {"application/json": {"schema": {"$ref": _REF.format(model="ErrorBody")}}}
    statuses = sorted({*STATUS_OF_CODE.values(), *REFUSED_STATUSES, 500})
    operation: dict[str, Any] = {
        "operationId": route.operation,
        "summary": route.summary,
        "responses": {
            "200": success,
            **{str(status): {"description": "Error", "content": failure} for status in statuses},
        },
    }
    if requests := [{"$ref": _REF.format(model=model.__name__)} for model in _requests(route)]:
        schema = {"anyOf": requests} if len(requests) > 1 else requests[0]
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if route.control:
        operation["security"] = [{"control": []}]
    elif route.generation:  # the empty one: a server may leave generation open
        operation["security"] = [{}, {"generation": []}, {"control": []}]
    return operation


def _requests(route: Route[Any]) -> list[type[BaseModel]]:
    """Return the models of a route's request; a request that specifies a transport has one per installed transport."""
    if route.request is TransportBody:
        return list(dict.fromkeys(transport.spec_type for transport in installed_transports()))
    return [] if route.request is None else [route.request]


def main() -> None:
    """Print the document."""
    print(json.dumps(openapi_document(), indent=2, sort_keys=True))


if __name__ == "__main__":
    main()
