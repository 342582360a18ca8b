"""A bad request gets an error that says what is wrong, and the server serves the next one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests
from sglang.srt.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_m3.tiny import TinyConfig
from tests.serving.conftest import Endpoint

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("bfloat16")]

VOCAB = TinyConfig().vocab
CONTEXT = TinyConfig().max_position
SAMPLING = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}
JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model(endpoint: Endpoint) -> str:
    return requests.get(f"{endpoint.url}/v1/models", timeout=60).json()["data"][0]["id"]


@pytest.fixture(autouse=True)
def next_request(endpoint: Endpoint) -> Any:
    """Every test ends with a request that must be served."""
    yield
    answer = requests.post(
        f"{endpoint.url}/generate", json={"input_ids": [5, 6, 7], "sampling_params": SAMPLING}, timeout=60
    )
    assert answer.status_code == 200 and len(answer.json()["output_ids"]) == 2, answer.text


def generate(endpoint: Endpoint, sampling: dict[str, Any] | None = None, **fields: Any) -> requests.Response:
    body = {"sampling_params": SAMPLING | (sampling or {}), **fields}
    return requests.post(f"{endpoint.url}/generate", json=body, timeout=60)


def refused(answer: requests.Response, *words: str, status: int = 400) -> None:
    assert answer.status_code == status, answer.text[:500]
    for word in words:
        assert word in answer.text, answer.text[:500]
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": [5] * (CONTEXT + 1)}, ("longer than the model's context length", f"{CONTEXT}")),
        ({"input_ids": [5], "sampling": {"max_new_tokens": CONTEXT}}, ("maximum context length",)),
        ({"input_ids": []}, ("empty",)),
        ({"text": ""}, ("prompt is empty",)),
        ({"text": ["a", ""]}, ("prompt is empty",)),
        ({}, ("text, input_ids or input_embeds",)),
        ({"input_ids": [5, VOCAB]}, (f"token id {VOCAB} at position 1", f"0 to {VOCAB - 1}")),
        ({"input_ids": [5, 6, -1]}, ("token id -1 at position 2",)),
        ({"input_ids": [[5], [6, 10**9]]}, ("token id 1000000000 at position 1",)),
        ({"input_ids": [5, 2**70]}, ("input_ids",)),
        ({"input_ids": ["a"]}, ("input_ids", "int")),
        ({"input_ids": [1.5]}, ("input_ids", "int")),
        ({"text": 5}, ("text", "string")),
        ({"input_ids": [5], "sampling": {"temperature": -1}}, ("temperature",)),
        ({"input_ids": [5], "sampling": {"temprature": 1}}, ("temprature",)),
        ({"input_ids": [5], "sampling": {"stop_token_ids": [VOCAB]}}, ("stop_token_ids", f"{VOCAB}")),
        ({"input_ids": [5], "sampling": {"logit_bias": {str(VOCAB): 1}}}, ("logit_bias",)),
        ({"input_ids": [5], "sampling": {"regex": "("}}, ("regex",)),
        ({"input_ids": [5], "sampling": {"stop_regex": "("}}, ("stop_regex", "no regular expression")),
        (
            {"input_ids": [5], "return_logprob": True, "top_logprobs_num": VOCAB + 1},
            ("top_logprobs", f"0 to {VOCAB}"),
        ),
        ({"input_ids": [5], "return_logprob": True, "token_ids_logprob": [VOCAB]}, ("token_ids_logprob",)),
        ({"input_ids": [5], "session_params": {"id": "none"}}, ("session id none",)),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_native_request(endpoint: Endpoint, fields: dict[str, Any], words: tuple[str, ...]) -> None:
    refused(generate(endpoint, **fields), *words)


def test_the_largest_token_id_and_all_logprobs_are_served(endpoint: Endpoint) -> None:
    """The edges of what is refused."""
    answer = generate(
        endpoint,
        {"stop_token_ids": [VOCAB - 1]},
        input_ids=[0, VOCAB - 1],
        return_logprob=True,
        top_logprobs_num=VOCAB,
    )
    assert answer.status_code == 200, answer.text[:500]
    assert len(answer.json()["meta_info"]["output_top_logprobs"][0]) == VOCAB


ENDPOINTS = (
    "generate",
    "invocations",
    "v1/chat/completions",
    "v1/completions",
    "v1/messages",
    "v1/messages/count_tokens",
    "v1/responses",
)


def post_text(endpoint: Endpoint, path: str, body: bytes) -> requests.Response:
    return requests.post(f"{endpoint.url}/{path}", data=body, headers=JSON, timeout=60)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(
    ("body", "words"),
    [(b'{"text": ', "JSON decode error"), (b"", "Field required"), (b"\xff", "JSON decode error")],
)
def test_invalid_json(endpoint: Endpoint, path: str, body: bytes, words: str) -> None:
    refused(post_text(endpoint, path, body), words)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("body", [b"[]", b'"text"', b"null"])
def test_json_that_is_no_object(endpoint: Endpoint, path: str, body: bytes) -> None:
    answer = post_text(endpoint, path, body)
    refused(answer)
    assert "object" in answer.text or "dictionary" in answer.text, answer.text[:500]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("generate", {"rid": []}, "rid must be a string"),
        ("generate", {"return_hidden_states": []}, "return_hidden_states must be one value"),
        ("generate", {"positional_embed_overrides": 0}, "positional_embed_overrides"),
        ("generate", {"custom_labels": {"a": "b"}}, "custom_labels"),
        ("generate", {"session_params": {"a": 1}}, "session_params has no field 'a'"),
        ("generate", {"sampling_params": []}, "wrong type"),
        ("generate", {"sampling_params": [{}]}, "sampling_params must be an object"),
        ("generate", {"text": ["x"]}, "input_ids must be a list"),
        ("v1/chat/completions", {"response_format": "json"}, "must be an object, not 'json'"),
        ("v1/chat/completions", {"rid": ["x"]}, "rid must be a string"),
        ("v1/completions", {"rid": []}, "rid must be a string"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wrong_types_that_sglang_would_die_of_or_answer_500(
    endpoint: Endpoint, model: str, path: str, fields: dict[str, Any], words: str
) -> None:
    prompts = {"generate": {"input_ids": [5]}, "v1/completions": {"prompt": "a"}}
    body = {"model": model, **prompts.get(path, {"messages": HELLO}), **fields}
    if path == "generate":
        del body["model"]
    refused(requests.post(f"{endpoint.url}/{path}", json=body, timeout=60), words)


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("completions", {"prompt": ""}, ("Prompt cannot be empty",)),
        ("completions", {"prompt": []}, ("Prompt cannot be empty",)),
        ("completions", {"prompt": [5, VOCAB]}, (f"token id {VOCAB} at position 1",)),
        ("completions", {"prompt": [5, VOCAB], "stream": True}, (f"token id {VOCAB} at position 1",)),
        ("completions", {"prompt": "a", "logprobs": 50_000}, ("top_logprobs",)),
        ("completions", {"prompt": "a", "max_tokens": "x"}, ("max_tokens", "integer")),
        ("chat/completions", {"messages": []}, ("Messages cannot be empty",)),
        ("chat/completions", {"messages": "hello"}, ("messages", "list")),
        ("chat/completions", {"messages": HELLO, "max_tokens": -3}, ("at least 0",)),
        (
            "chat/completions",
            {"messages": HELLO, "logprobs": True, "top_logprobs": 50_000},
            ("top_logprobs",),
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a " * CONTEXT}]},
            ("context length",),
        ),
        ("messages", {"messages": [{"role": "user", "content": "a " * CONTEXT}]}, ("context length",)),
        ("responses", {"input": "a " * CONTEXT}, ("context length",)),
        ("completions", {"prompt": [5] * (CONTEXT + 1)}, ("context length",)),
        ("messages", {"messages": []}, ("Messages cannot be empty",)),
        ("responses", {"input": []}, ("empty",)),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_openai_request(
    endpoint: Endpoint, model: str, path: str, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    body = {"model": model, "max_tokens": 2, **fields}
    refused(requests.post(f"{endpoint.url}/v1/{path}", json=body, timeout=60), *words)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": HELLO}),
        ("chat/completions", {"messages": HELLO, "stream": True}),
        ("responses", {"input": "a"}),
        ("messages", {"messages": HELLO, "max_tokens": 2}),
        ("messages", {"messages": HELLO, "max_tokens": 2, "stream": True}),
        ("messages/count_tokens", {"messages": HELLO}),
    ],
    ids=str,
)
def test_another_models_name_is_not_found(endpoint: Endpoint, path: str, fields: dict[str, Any]) -> None:
    body = {"model": "another/model", **fields}
    answer = requests.post(f"{endpoint.url}/v1/{path}", json=body, timeout=60)
    refused(answer, "another/model", "does not exist", status=404)


def test_the_default_name_means_the_served_model(endpoint: Endpoint) -> None:
    body = {"messages": HELLO, "max_tokens": 2}
    assert requests.post(f"{endpoint.url}/v1/chat/completions", json=body, timeout=60).status_code == 200


STRANGE: tuple[Any, ...] = (
    0, -1, 2.5, True, "x", [], ["x"], [[]], [{}], {"a": 1}, {"type": 3}, {"type": "json_schema"},
    {"type": "json_schema", "json_schema": "x"}, {"type": "json_schema", "json_schema": {"schema": 3}}, 2**70,
)  # fmt: skip

READERS: dict[str, tuple[type, dict[str, Any]]] = {
    "v1/chat/completions": (ChatCompletionRequest, {"messages": HELLO, "max_tokens": 2}),
    "v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 2}),
    "v1/responses": (ResponsesRequest, {"input": "a", "max_output_tokens": 2}),
    "v1/messages": (AnthropicMessagesRequest, {"messages": HELLO, "max_tokens": 2}),
    "v1/messages/count_tokens": (AnthropicCountTokensRequest, {"messages": HELLO}),
    "generate": (GenerateReqInput, {"input_ids": [5], "sampling_params": SAMPLING}),
}
"""Endpoint -> how SGLang reads a request, and one that is right."""

CODE = "custom_logit_processor"
"""A program by design, and taken with a flag only, which this server has."""


def mutated(path: str, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests that are right but for one field of the wrong type, with the field's name."""
    reader, right = READERS[path]
    if path != "generate":
        right = {"model": model, **right}
    for name in sorted(set(inspect.signature(reader).parameters) - {CODE}):
        yield from ((name, right | {name: value}) for value in STRANGE)
    for name in ("role", "content", "tool_calls", "tools", "name") if "messages" in right else ():
        yield from ((name, right | {"messages": [{**HELLO[0], name: value}]}) for value in STRANGE)
    for name in inspect.signature(SamplingParams).parameters if path == "generate" else ():
        yield from ((name, right | {"sampling_params": {**SAMPLING, name: value}}) for value in STRANGE)


@pytest.mark.long
@pytest.mark.parametrize("path", READERS)
def test_any_field_of_a_wrong_type_is_served_or_refused(endpoint: Endpoint, model: str, path: str) -> None:
    wrong = []
    session = requests.Session()
    for name, body in mutated(path, model):
        answer = session.post(f"{endpoint.url}/{path}", data=json.dumps(body), headers=JSON, timeout=60)
        if answer.status_code not in (200, 400, 404, 422):
            wrong.append(f"{name} of {body}: {answer.status_code} {answer.text[:100]}")
    assert not wrong, "\n".join(wrong)
