"""`/openapi.json`: the HTTP interface as a document, made from the structs of `protocol.py`."""

from __future__ import annotations

from typing import Any

import msgspec

from nanoserve import __version__
from nanoserve.api.protocol import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
STREAMS = ("/v1/completions", "/v1/chat/completions")
GETS = {
    "/": ("the chat page", "text/html"),
    "/health": ("200 while the engine lives, also when it is busy", "application/json"),
    "/metrics": ("Prometheus metrics", "text/plain"),
    "/openapi.json": ("this document", "application/json"),
    "/stats": ("the batch right now", "application/json"),
    "/v1/models": ("the model that is served", "application/json"),
    "/version": ("the version of nanoserve", "application/json"),
}
DEBUG_GETS = {
    "/debug/blocks": ("the KV blocks: tables, reference counts, hashes, free queue", "application/json"),
    "/debug/trace": ("the last steps", "application/json"),
}
PARAMETERS = {
    "/debug/trace": [
        {"name": "limit", "in": "query", "required": False, "schema": {"type": "integer", "minimum": 1, "maximum": 32}}
    ]
}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def openapi_document(*, debug: bool, secured: bool) -> dict[str, Any]:
    """OpenAPI 3.1. `debug`: with the debug endpoints; `secured`: an API key is needed."""
    _, schemas = msgspec.json.schema_components(list(BODIES.values()), ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {}
    for path, kind in BODIES.items():
        answers = {"application/json": {"schema": {"type": "object"}}}
        if path in STREAMS:
            answers["text/event-stream"] = {"schema": {"type": "string"}}
        schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
        paths[path] = {
            "post": {
                "summary": (kind.__doc__ or "").splitlines()[0],
                "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
                "responses": {"200": {"description": "the answer", "content": answers}, **_errors()},
            }
        }
    for path, (summary, media_type) in {**GETS, **(DEBUG_GETS if debug else {})}.items():
        content = {media_type: {"schema": {"type": "object" if media_type == "application/json" else "string"}}}
        paths[path] = {
            "get": {
                "summary": summary,
                "parameters": PARAMETERS.get(path, []),
                "responses": {"200": {"description": summary, "content": content}, **_errors()},
            }
        }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "nanoserve", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": ERROR}},
    }
    if secured:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _errors() -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "4XX": {"description": "the request is refused", "content": error},
        "5XX": {"description": "the server cannot do it now", "content": error},
    }
