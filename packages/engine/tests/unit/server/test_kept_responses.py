"""Responses with a store: the official client goes on from what is kept, each key alone."""

from __future__ import annotations

import base64
import json
from contextlib import contextmanager

import httpx
import openai
import pytest
from server_fakes import EOS, FakeEngine, Script, byte_codec, byte_tokenizer_json
from server_socket import serving

from deepinfer_engine.codec.recipe_codec import RecipeCodec
from deepinfer_engine.codec.responses import open_responses, read_sealer
from deepinfer_engine.errors import ConfigError
from deepinfer_engine.server.app import create_app
from deepinfer_engine.settings import REASONING_KEYS_ENV, Settings, load_settings
from deepinfer_recipe import MemoryResponseStore, SpecialToken, StoreError, StoreLimits, Tokenizer

MARK = SpecialToken.Dsml.value
CALL = f"""I add.</think>

<{MARK} calls>
<{MARK} invoke name="add">
<{MARK} parameter name="a" string="false">2</{MARK} parameter>
<{MARK} parameter name="b" string="false">3</{MARK} parameter>
</{MARK} invoke>
</{MARK} calls>"""
ADD = {
    "type": "function",
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}
SEALING = {REASONING_KEYS_ENV: "k1:" + base64.b64encode(bytes(32)).decode()}


@contextmanager
def client_of(world):
    """The official client of a running server."""
    with (
        serving(world.build) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client,
    ):
        yield client.responses


class World:
    """A server whose model adds with a tool, then tells the sum; `prompts` are what it saw."""

    def __init__(self, store=None, settings=None):
        self.prompts: list[str] = []
        self.codec = RecipeCodec(
            Tokenizer.from_str(byte_tokenizer_json()),
            ("toy",),
            wall=lambda: 1_700_000_000.0,
            responses=store,
            sealer=read_sealer(SEALING),
        )
        self.settings = settings or Settings()

    def script(self, request):
        prompt = self.codec.detokenize(request.token_ids)
        self.prompts.append(prompt)
        said = "Done.</think>It is 5." if "<tool_result>" in prompt else CALL
        ids = [*self.codec.tokenize(said), EOS]
        return Script([ids[i : i + 4] for i in range(0, len(ids), 4)])

    def build(self):
        return create_app(FakeEngine(self.script), self.codec, self.settings)


@pytest.fixture(params=["memory", "sqlite"])
def world(request, tmp_path):
    where = "memory" if request.param == "memory" else f"sqlite:{tmp_path / 'responses.db'}"
    return World(open_responses(where))


@pytest.fixture
def server(world):
    with serving(world.build) as running:
        yield running


@pytest.fixture
def responses(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client.responses


def ask(responses, *, stream=False, **body):
    if not stream:
        return responses.create(model="toy", tools=[ADD], **body)
    with responses.stream(model="toy", tools=[ADD], **body) as events:
        return events.get_final_response()


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_goes_on_from_the_previous_response(responses, world, stream):
    answer = ask(responses, stream=stream, input="2 + 3?")
    assert answer.store is True
    for _ in range(3):
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        results = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": str(sum(json.loads(call.arguments).values())),
            }
            for call in calls
        ]
        answer = ask(responses, stream=stream, input=results, previous_response_id=answer.id)
    assert answer.output_text == "It is 5."
    assert answer.previous_response_id is not None
    first, second = world.prompts
    # The cache of the first turn serves the second: its output comes back as it was.
    assert second.startswith(first + CALL)
    assert "<tool_result>5</tool_result>" in second


def test_kept_answers_are_read_listed_and_deleted(responses):
    answer = ask(responses, input="2 + 3?")
    assert responses.retrieve(answer.id).to_dict() == answer.to_dict()
    [item] = responses.input_items.list(answer.id).data
    assert item.content[0].text == "2 + 3?"
    responses.delete(answer.id)
    for again in (
        lambda: responses.retrieve(answer.id),
        lambda: responses.delete(answer.id),
        lambda: responses.input_items.list(answer.id),
    ):
        with pytest.raises(openai.NotFoundError):
            again()
    with pytest.raises(openai.NotFoundError) as caught:
        ask(responses, input="and?", previous_response_id=answer.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


def test_store_false_is_not_kept(responses):
    answer = ask(responses, input="2 + 3?", store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(answer.id)


def test_wrong_page_parameters_are_named(responses, server):
    answer = ask(responses, input="2 + 3?")
    url = f"{server.url}/v1/responses/{answer.id}/input_items"
    for name, value in [("limit", "many"), ("limit", "0"), ("order", "up"), ("after", "nobody")]:
        reply = httpx.get(url, params={name: value})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
        assert value in reply.json()["error"]["message"]


def test_one_key_neither_sees_nor_continues_what_is_anothers(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann:secret-a\nbob:secret-b\n")
    world = World(MemoryResponseStore(), Settings(api_key_file=keys))
    with serving(world.build) as server:
        url = server.url + "/v1"
        ann = openai.OpenAI(base_url=url, api_key="secret-a", max_retries=0).responses
        bob = openai.OpenAI(base_url=url, api_key="secret-b", max_retries=0).responses
        answer = ask(ann, input="2 + 3?")
        assert ann.retrieve(answer.id).id == answer.id
        with pytest.raises(openai.NotFoundError):
            bob.retrieve(answer.id)
        with pytest.raises(openai.NotFoundError):
            bob.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            ask(bob, input="and?", previous_response_id=answer.id)
        assert ann.retrieve(answer.id).id == answer.id
        assert httpx.get(f"{url}/responses/{answer.id}").status_code == 401


def test_a_file_keeps_answers_over_a_restart(tmp_path):
    where = f"sqlite:{tmp_path / 'responses.db'}"
    with client_of(World(open_responses(where))) as responses:
        answer = ask(responses, input="2 + 3?")
    with client_of(World(open_responses(where))) as responses:
        assert responses.retrieve(answer.id).id == answer.id


def test_without_a_store_nothing_is_there_and_the_error_says_how():
    with client_of(World()) as responses:
        answer = ask(responses, input="2 + 3?")
        assert answer.store is False
        with pytest.raises(openai.NotFoundError, match="--responses-store"):
            responses.retrieve(answer.id)


def test_a_store_that_fails_spoils_no_answer_and_is_told_as_busy():
    class Broken(MemoryResponseStore):
        def get(self, owner, id):
            raise StoreError("disk on fire")

        put = delete = get  # type: ignore[assignment]

    with client_of(World(Broken())) as responses:
        answer = ask(responses, input="2 + 3?")
        assert answer.status == "completed"
        with pytest.raises(openai.InternalServerError) as caught:
            responses.retrieve(answer.id)
        assert caught.value.status_code == 503
        with pytest.raises(openai.InternalServerError):
            ask(responses, input="and?", previous_response_id=answer.id)


def test_an_answer_too_large_to_keep_is_given_all_the_same():
    store = MemoryResponseStore(StoreLimits(max_response_bytes=10))
    with client_of(World(store)) as responses:
        assert ask(responses, input="2 + 3?").status == "completed"
    assert len(store) == 0


def test_sealed_reasoning_survives_stateless_turns_of_its_key_only(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann:secret-a\nbob:secret-b\n")
    world = World(settings=Settings(api_key_file=keys))
    with serving(world.build) as server:
        url = server.url + "/v1"
        ann = openai.OpenAI(base_url=url, api_key="secret-a", max_retries=0).responses
        bob = openai.OpenAI(base_url=url, api_key="secret-b", max_retries=0).responses
        include = ["reasoning.encrypted_content"]
        answer = ask(ann, input="2 + 3?", store=False, include=include)
        thought = answer.output[0]
        assert thought.encrypted_content.startswith("dr1.k1.")
        carried = {
            "type": "reasoning",
            "summary": [],
            "encrypted_content": thought.encrypted_content,
        }
        call = answer.output[1].to_dict()
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
        history = [{"role": "user", "content": "2 + 3?"}, carried, call, result]
        assert ask(ann, input=history, include=include).output_text == "It is 5."
        assert world.prompts[1].startswith(world.prompts[0] + CALL)
        with pytest.raises(openai.BadRequestError) as caught:
            ask(bob, input=history)
        assert caught.value.param == "input[1].encrypted_content"


def test_settings_that_cannot_be_used_are_told_at_the_start(tmp_path):
    for wrong in ("disk", "sqlite:", "sqlite"):
        with pytest.raises(ConfigError, match="memory or sqlite:PATH"):
            load_settings({"responses_store": wrong}, environ={})
    assert load_settings({"responses_store": "memory"}, environ=SEALING).responses_store == "memory"
    with pytest.raises(ConfigError, match="responses_store"):
        open_responses(f"sqlite:{tmp_path / 'no' / 'x.db'}")
    with pytest.raises(ConfigError, match=REASONING_KEYS_ENV) as caught:
        read_sealer({REASONING_KEYS_ENV: "k1:secretsecret"})
    assert "secretsecret" not in str(caught.value)
    assert byte_codec().kept_responses is None
