"""Token ids and models' names are checked for M3, and for M3 only."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from sglang_m3 import admission

M3, OTHER = "MiniMaxM3SparseForConditionalGeneration", "LlamaForCausalLM"
VOCAB = 1000
WIDTH = 3


def manager(architecture: str, quantization: str | None = None, **fields: Any) -> SimpleNamespace:
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]),
        vocab_size=VOCAB,
        quantization=quantization,
        hidden_size=WIDTH,
        dtype=torch.bfloat16,
    )
    return SimpleNamespace(model_config=config, **fields)


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    """What SGLang's server was started with."""
    monkeypatch.setattr(admission, "get_serving", lambda: SimpleNamespace(served_model_name="tiny"))
    labels = SimpleNamespace(tokenizer_metrics_allowed_custom_labels=["team"])
    monkeypatch.setattr(admission, "get_observability", lambda: labels)


def validated(input_ids: Any, architecture: str = M3, quantization: str | None = None, **fields: Any) -> int:
    """How often SGLang's own check was called."""
    calls: list[Any] = []
    request = {"input_embeds": None, "sampling_params": {}, "session_params": None, "top_logprobs_num": 0}
    admission.around_validate_one_request(
        lambda *given: calls.append(given),
        manager(architecture, quantization),
        SimpleNamespace(**request | fields),
        input_ids,
    )
    return len(calls)


@pytest.mark.parametrize("numbers", [[[0.5, -1e38, 2]], [[0.0] * WIDTH] * 300])
def test_embeddings_as_wide_as_the_model_go_on_to_sglang(numbers: Any) -> None:
    assert validated(None, input_embeds=numbers) == 1


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([[0.5] * (WIDTH - 1)], f"list of {WIDTH} numbers for each token"),
        ([[0.5] * WIDTH, [0.5] * (WIDTH + 1)], f"list of {WIDTH} numbers"),
        ([0.5] * WIDTH, f"list of {WIDTH} numbers"),
        ([[[0.5] * WIDTH]], f"list of {WIDTH} numbers"),
        ([], f"list of {WIDTH} numbers"),
        ([[]], f"list of {WIDTH} numbers"),
        ([["0.5"] * WIDTH], f"list of {WIDTH} numbers"),
        ([[None] * WIDTH], f"list of {WIDTH} numbers"),
        ([[True] * WIDTH], f"list of {WIDTH} numbers"),
        ([[0.5] * WIDTH, [0.5, float("nan"), 1]], "nan at place 1 of token 1"),
        ([[0.5, 1, -float("inf")]], "-inf at place 2 of token 0"),
        ([[1e39, 1, 1]], "1e+39 at place 0 of token 0; this model takes finite numbers of bfloat16"),
        ([[2**70, 1, 1]], f"list of {WIDTH} numbers"),
        (torch.zeros(2, WIDTH, dtype=torch.bfloat16), f"list of {WIDTH} numbers"),
    ],
)
def test_embeddings_that_would_end_the_server_or_spread_are_refused(numbers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        validated(None, input_embeds=numbers)
    assert validated(None, OTHER, input_embeds=numbers) == 1


@pytest.mark.parametrize("ids", [[0], [VOCAB - 1], [3, 1, 2] * 100])
def test_ids_of_the_vocabulary_go_on_to_sglang(ids: list[int]) -> None:
    assert validated(ids) == 1


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([VOCAB], f"token id {VOCAB} at position 0"),
        ([0, 5, -1], "token id -1 at position 2"),
        ([0] * 5000 + [VOCAB + 7] + [0, -3], f"token id {VOCAB + 7} at position 5000"),
        ([2**63], "token id 9223372036854775808"),
        ([2**70], "flat list of integers"),
        ([1.0], "flat list of integers"),
        ([True], "flat list of integers"),
        (["1"], "flat list of integers"),
        ([[1], [2]], "flat list of integers"),
        ([[1], 2], "flat list of integers"),
        ([], "empty"),
        (None, "empty"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_other_ids_do_not(ids: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validated(ids)
    assert validated(ids, OTHER) == 1
    assert validated(ids, quantization="minimax_m3_nvfp4") == 1


def test_what_is_right_elsewhere_goes_on() -> None:
    assert validated([1], sampling_params={"stop_regex": "a+", "stop_token_ids": [0, VOCAB - 1]}) == 1
    assert validated([1], sampling_params=None, top_logprobs_num=VOCAB) == 1
    assert validated([1], return_hidden_states="last", custom_labels={"team": "a"}, rid="x") == 1


def test_embeddings_and_a_continued_session_need_no_ids() -> None:
    assert validated(None, input_embeds=[[0.5] * WIDTH]) == 1
    assert validated([], session_params={"id": "x", "rid": "y", "offset": 3}) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_params": {"stop_token_ids": [1, VOCAB]}}, r"stop_token_ids .* at position 1"),
        ({"top_logprobs_num": VOCAB + 1}, "top_logprobs must be 0 to 1000"),
        ({"top_logprobs_num": "3"}, "top_logprobs must be an integer"),
        ({"sampling_params": {"stop_token_ids": 5}}, "stop_token_ids must be a list"),
        ({"sampling_params": {"stop_regex": 5}}, "stop_regex must be a string or a list"),
        ({"sampling_params": {"stop_regex": [5]}}, "stop_regex must be a string or a list"),
        ({"top_logprobs_num": -1}, "top_logprobs"),
        ({"sampling_params": {"stop_regex": "("}}, r"stop_regex '\(' is no regular expression"),
        ({"sampling_params": {"stop_regex": ["a+", "[b"]}}, r"stop_regex '\[b'"),
        ({"sampling_params": [{}]}, r"sampling_params must be an object for each prompt, got \[{}\]"),
        ({"session_params": {"id": "x", "ids": 3}}, "session_params has no field 'ids'"),
        ({"custom_labels": {"team": "a", "tenant": "b"}}, "custom_labels has 'tenant'"),
        ({"positional_embed_overrides": [[0.5]]}, "positional_embed_overrides are tensors"),
        *(({name: []}, f"{name} must be one value") for name in admission.ONE_PER_REQUEST),
    ],
    ids=str,
)
def test_what_would_end_the_scheduler_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validated([1], **fields)
    assert validated([1], OTHER, **fields) == 1


@pytest.mark.parametrize("rid", [[], ["a"], 3, None], ids=str)
@pytest.mark.parametrize("batch", [False, True])
def test_a_requests_id_is_a_string(rid: Any, batch: bool) -> None:
    def registered(architecture: str) -> int:
        calls: list[Any] = []
        request = SimpleNamespace(rid=["good", rid] if batch else rid, is_single=not batch)
        admission.around_init_req_state(lambda *given: calls.append(given), manager(architecture), request, 1)
        return len(calls)

    assert registered(OTHER) == 1
    with pytest.raises(ValueError, match=r"rid must be a string for each prompt, got (\[|3|None)"):
        registered(M3)


def test_one_of_several_samples_of_a_prompt_is_registered() -> None:
    """SGLang's copies of a request, one for each sample, do not say that they are single."""
    calls: list[Any] = []
    admission.around_init_req_state(lambda *given: calls.append(given), manager(M3), SimpleNamespace(rid="x"))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "architecture", "enable_lora", "served"),
    [
        ("tiny", M3, False, True),
        ("/models/tiny", M3, False, True),
        ("default", M3, False, True),
        ("tiny:adapter", M3, False, True),
        ("/models/tiny:4", M3, False, True),
        ("another", M3, False, False),
        ("another:adapter", M3, False, False),
        ("", M3, False, False),
        ("adapter", M3, True, True),
        ("another", OTHER, False, True),
    ],
)
def test_models_names(name: str, architecture: str, enable_lora: bool, served: bool) -> None:
    async def original(*_: Any) -> str:
        return "served"

    serving = SimpleNamespace(
        tokenizer_manager=manager(
            architecture,
            # What SGLang puts there after a weight update from disk.
            served_model_name="/models/tiny",
            model_path="/models/tiny:4",
            server_args=SimpleNamespace(enable_lora=enable_lora),
        ),
        create_error_response=lambda message, **fields: (message, fields),
    )
    request = SimpleNamespace(model=name)
    answer = asyncio.run(admission.around_handle_request(original, serving, request, None))
    if served:
        assert answer == "served"
    else:
        message, fields = answer
        assert repr(name) in message and "'tiny'" in message and fields["status_code"] == 404


@pytest.fixture
def client() -> TestClient:
    """An endpoint that reads chat requests as SGLang's do, and then fails."""
    app = FastAPI()

    @app.post("/chat")
    def chat(request: ChatCompletionRequest) -> Any:
        return request.nothing

    admission.answer_wrong_types(app)
    return TestClient(app, raise_server_exceptions=False)


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ([], ["body"]),
        ([CHAT], ["body"]),
        ("x", ["body"]),
        (7, ["body"]),
        (CHAT | {"response_format": "json"}, ["body", "response_format"]),
        (CHAT | {"response_format": [1]}, ["body", "response_format"]),
    ],
    ids=str,
)
def test_a_chat_request_of_a_wrong_type_is_told_where(
    client: TestClient, body: Any, place: list[str]
) -> None:
    answer = client.post("/chat", json=body)
    (problem,) = answer.json()["detail"]
    assert answer.status_code == 422, "SGLang makes it 400"
    wrong = body["response_format"] if len(place) > 1 else body
    assert (problem["loc"], problem["msg"]) == (place, f"must be an object, not {wrong!r:.60}")


def test_other_errors_stay_what_they_are(client: TestClient) -> None:
    assert client.post("/chat", json=CHAT).status_code == 500
