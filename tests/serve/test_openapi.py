"""The OpenAPI document says what is sent, and nothing else."""

from __future__ import annotations

from regard.serve.app import create_app
from regard.serve.service import Service


def test_every_route_says_how_it_refuses_and_none_in_words_that_are_not_ours(service: Service) -> None:
    document = create_app(service).openapi()
    routes = [(path, verb, route) for path, verbs in document["paths"].items() for verb, route in verbs.items()]
    assert len(routes) > 10
    for path, verb, route in routes:
        assert {"4XX", "5XX"} <= set(route["responses"]), (path, verb)
        # What FastAPI says of a body that does not fit, and this server does not: that is 400, in the shape of all errors.
        assert "422" not in route["responses"], (path, verb)
    assert "HTTPValidationError" not in document.get("components", {}).get("schemas", {})


def test_routes_that_stream_say_so(service: Service) -> None:
    paths = create_app(service).openapi()["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        assert set(paths[path]["post"]["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
