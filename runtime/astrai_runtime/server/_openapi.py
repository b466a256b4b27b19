"""The OpenAPI document of the routes that this deployment has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from astrai_runtime.protocols.base import Endpoint, Lookup

SYSTEM_ROUTES = {
    "/health": "Whether the process lives. Never asks for a key.",
    "/ready": "200 once requests are answered, else 503 with the reason.",
    "/stats": "Counts of the engine.",
    "/v1/models": "The models that are served.",
    "/v1/models/{model}": "One model.",
    "/metrics": "Prometheus metrics. An admin route.",
    "/openapi.json": "This document.",
    "/schema": "This document.",
}
ERROR = {"description": "An error in the envelope of the route's API", "content": {"application/json": {}}}

PATCH_SCHEDULER = {
    "summary": "Changes max_prompt_tokens_per_tick of the running scheduler. An admin route.",
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"max_prompt_tokens_per_tick": {"type": "integer", "minimum": 1}},
                    "required": ["max_prompt_tokens_per_tick"],
                    "additionalProperties": False,
                }
            }
        },
    },
    "responses": {"200": {"description": "What holds now", "content": {"application/json": {}}}, "default": ERROR},
}


def document(endpoints: Iterable[Endpoint | Lookup], *, keyed: bool) -> dict[str, Any]:
    """OpenAPI 3.1. `keyed`: routes ask for an API key."""
    routes = list(endpoints)
    bodies = {endpoint.request: None for endpoint in routes}
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {
        path: {"get": {"summary": said, "responses": {"200": {"description": "OK"}, "default": ERROR}}}
        for path, said in SYSTEM_ROUTES.items()
    }
    model = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"]["get"]["parameters"] = [model]
    for endpoint in routes:
        schema = {"$ref": f"#/components/schemas/{endpoint.request.__name__}"}
        paths[endpoint.path] = {
            "post": {
                "summary": (endpoint.request.__doc__ or "").strip().split("\n")[0],
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": _answer(endpoint), "default": ERROR},
            }
        }
    paths["/admin/scheduler"] = {"patch": PATCH_SCHEDULER}
    components: dict[str, Any] = {"schemas": found.get("$defs", {})}
    built: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "astrai-deploy", "version": "1"},
        "paths": paths,
        "components": components,
    }
    if keyed:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        built["security"] = [{"key": []}]
        paths["/health"]["get"]["security"] = []
    return built


def _answer(endpoint: Endpoint | Lookup) -> dict[str, Any]:
    if isinstance(endpoint, Lookup):
        return {"description": "The answer", "content": {"application/json": {}}}
    said = "The answer, or its events when `stream` is true"
    return {"description": said, "content": {"application/json": {}, "text/event-stream": {}}}
