"""The description of the routes, and schemathesis against it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from serving import Running, make_service

ROUTES = {
    "/health", "/metrics", "/v1/info", "/v1/models", "/v1/models/{name}", "/v1/sessions", "/v1/sessions/import", "/v1/sessions/{name}",
    "/v1/sessions/{name}/fork", "/v1/sessions/{name}/undo", "/v1/sessions/{name}/export", "/v1/sessions/{name}/trace",
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/responses/{response_id}",
}  # fmt: skip


def test_all_routes_and_bodies_are_described(server):
    with server.client() as client:
        found = client.get("/openapi.json").json()
    assert set(found["paths"]) == ROUTES
    chat = found["paths"]["/v1/chat/completions"]["post"]
    assert chat["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert "session" in found["components"]["schemas"]["ChatRequest"]["properties"]


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    with Running(make_service(tmp_path_factory.mktemp("described"), max_tokens=8)) as running:
        yield running


@pytest.mark.parametrize("method, path", [(m, p) for p in sorted(ROUTES) for m in ("get", "post", "patch", "delete")])
def test_generated_requests_are_answered_as_described(described, method, path):
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis, which is in the extra dev")
    schema = schemathesis.openapi.from_url(f"{described.url}/openapi.json")
    if method not in schema.raw_schema["paths"][path]:
        return
    checks = [schemathesis.checks.not_a_server_error]
    operation = schema[path][method.upper()]

    @given(case=operation.as_strategy())
    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    def check(case):
        answer = case.call(base_url=described.url, timeout=60)
        case.validate_response(answer, checks=checks)
        assert answer.status_code < 500

    check()
