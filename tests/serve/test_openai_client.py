"""The `openai` package talks to the server as to any other."""

from __future__ import annotations

import pytest

openai = pytest.importorskip("openai", reason="needs the package openai, which is in the extra dev")

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "mnemos"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_chat_answers_and_counts_tokens(client):
    found = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, temperature=0)
    assert found.choices[0].finish_reason == "length" and found.choices[0].message.role == "assistant"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (5, 4, 9)
    assert found.usage.prompt_tokens_details.cached_tokens == 0


def test_a_stream_is_the_answer_in_pieces(client):
    options = {"model": "tiny", "messages": HELLO, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.total_tokens == 17 and len({chunk.id for chunk in chunks}) == 1


def test_seeds_repeat_answers_and_n_answers_differ(client):
    def ask(seed, n=1):
        found = client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=12, seed=seed, n=n, temperature=1.5
        )
        return [choice.message.content for choice in found.choices]

    assert ask(7) == ask(7) != ask(8)
    three = ask(7, n=3)
    assert len(set(three)) == 3 and three[0] == ask(7)[0]


def test_stop_texts_end_the_answer(client):
    options = {"model": "tiny", "prompt": "hello", "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**options).choices[0].text
    stop = whole[5:7]
    found = client.completions.create(**options, stop=[stop]).choices[0]
    assert found.text == whole[: whole.index(stop)] and found.finish_reason == "stop"


def test_logprobs_are_those_of_the_likeliest_tokens(client):
    found = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, temperature=0, logprobs=True, top_logprobs=4
    )
    entries = found.choices[0].logprobs.content
    assert len(entries) == 3
    for entry in entries:
        assert len(entry.top_logprobs) == 4 and entry.logprob == entry.top_logprobs[0].logprob
        assert entry.top_logprobs == sorted(entry.top_logprobs, key=lambda other: -other.logprob)
    streamed = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, temperature=0, logprobs=True, stream=True
    )
    values = [e.logprob for c in streamed if c.choices and c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert values == [entry.logprob for entry in entries]


def test_completions_take_several_prompts_and_token_ids(client):
    one = [client.completions.create(model="tiny", prompt=p, max_tokens=5, temperature=0) for p in ("hello", "why")]
    both = client.completions.create(model="tiny", prompt=["hello", "why"], max_tokens=5, temperature=0)
    assert [choice.text for choice in both.choices] == [found.choices[0].text for found in one]
    ids = client.completions.create(model="tiny", prompt=list(b"hello"), max_tokens=5, temperature=0, logprobs=2)
    assert ids.choices[0].text == one[0].choices[0].text
    assert len(ids.choices[0].logprobs.token_logprobs) == 5
    echoed = client.completions.create(model="tiny", prompt="hello", max_tokens=5, temperature=0, echo=True)
    assert echoed.choices[0].text == "hello" + one[0].choices[0].text
    parts = client.completions.create(model="tiny", prompt="hello", max_tokens=5, temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in parts) == one[0].choices[0].text


def test_responses_continue_each_other(client):
    first = client.responses.create(model="tiny", input="hello", max_output_tokens=4, temperature=0)
    assert first.status == "incomplete" and first.incomplete_details.reason == "max_output_tokens"
    assert first.usage.input_tokens_details.cached_tokens == 0 and len(first.output_text) > 0
    options = {"model": "tiny", "input": " why", "max_output_tokens": 4, "temperature": 0}
    second = client.responses.create(**options, previous_response_id=first.id)
    again = client.responses.create(**options, previous_response_id=first.id)
    assert second.output_text == again.output_text and second.id != again.id  # the first one stayed as it was
    assert second.usage.input_tokens_details.cached_tokens == 5 + 3
    kept = client.responses.retrieve(second.id)
    assert kept.output_text == second.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(**options, previous_response_id=first.id)
    third = client.responses.create(**options, previous_response_id=second.id)
    assert third.usage.input_tokens_details.cached_tokens > 8


def test_a_response_that_is_not_stored_is_gone(client):
    found = client.responses.create(model="tiny", input="hello", max_output_tokens=2, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)


def test_responses_stream_their_events_in_order(client):
    options = {"model": "tiny", "input": "hello", "max_output_tokens": 6, "temperature": 0}
    whole = client.responses.create(**options)
    events = list(client.responses.create(**options, stream=True, instructions=None))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.incomplete"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text


def test_a_response_that_ends_by_itself_is_complete(client, server):
    server.service.dialogue.ends = frozenset(range(256))
    try:
        with client.responses.stream(model="tiny", input="hello") as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().status == "completed" and kinds[-1] == "response.completed"
    finally:
        server.service.dialogue.ends = frozenset()


def test_memory_fields_travel_as_extra_body(client):
    def turn(text, **extra):
        return client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": text}],
            max_tokens=4,
            temperature=0,
            extra_body={"session": "client"} | extra,
        )

    first = turn("hello")
    assert first.session["id"] == "client" and first.session["tokens_read"] == 8
    read = turn("why", memory="read")
    assert read.usage.prompt_tokens_details.cached_tokens == 8
    assert turn("why", memory="read").choices[0].message.content == read.choices[0].message.content
    assert turn("why").choices[0].message.content == read.choices[0].message.content
    assert turn("why").usage.prompt_tokens_details.cached_tokens == 8 + 4 + 3


def test_errors_are_those_of_the_package(client):
    with pytest.raises(openai.BadRequestError, match="tools cannot be used"):
        client.chat.completions.create(model="tiny", messages=HELLO, tools=[{"type": "function"}])
    with pytest.raises(openai.BadRequestError, match="sesion is unknown"):
        client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"sesion": "ann"})
    with pytest.raises(openai.NotFoundError, match="it is 'tiny'"):
        client.chat.completions.create(model="gpt-9", messages=HELLO)
