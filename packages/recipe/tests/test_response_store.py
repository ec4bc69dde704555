"""Stores keep answers for their owner, within limits; Responses requests go on from them."""

from __future__ import annotations

import sqlite3
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deepinfer_recipe import (
    Exchange,
    MemoryResponseStore,
    RecipeError,
    ResponseStore,
    SqliteResponseStore,
    StoredResponse,
    StoreError,
    StoreLimits,
    error_response,
    input_item_list,
)

MODEL = "DeepSeek-V4.1-Flash"
Make = Callable[..., Any]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "sqlite"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Makes a store of either kind."""

    def build(**options: Any) -> Any:
        if request.param == "memory":
            return MemoryResponseStore(**options)
        return SqliteResponseStore(tmp_path / f"{len(list(tmp_path.iterdir()))}.db", **options)

    return build


def stored(id: str, text: str = "", previous: str | None = None) -> StoredResponse:
    return StoredResponse(id, previous, 1, [{"type": "message", "id": "m"}], {"output": [text]})


def test_an_answer_comes_back_until_it_is_deleted(make: Make) -> None:
    store = make()
    answer = stored("r1", "é😀\x00", "r0")
    assert store.put("a", answer)
    assert store.get("a", "r1") == answer
    assert store.delete("a", "r1")
    assert not store.delete("a", "r1")
    assert store.get("a", "r1") is None
    assert len(store) == 0


def test_nobody_reads_or_deletes_what_is_anothers(make: Make) -> None:
    store = make()
    store.put("a", stored("r1"))
    assert store.get("b", "r1") is None
    assert not store.delete("b", "r1")
    store.put("b", stored("r1", "b's"))
    assert store.get("a", "r1") == stored("r1")
    assert store.get("b", "r1") == stored("r1", "b's")


def test_what_was_not_used_for_longest_goes_first(make: Make) -> None:
    clock = Clock()
    store = make(limits=StoreLimits(max_responses=2), clock=clock)
    for name in ("r1", "r2", "r3"):
        clock.now += 1
        store.put("a", stored(name))
        if name == "r2":
            clock.now += 1
            assert store.get("a", "r1")
    assert [store.get("a", name) is not None for name in ("r1", "r2", "r3")] == [True, False, True]


def test_bytes_are_limited_in_all_and_for_one(make: Make) -> None:
    one = len(stored("r1", "x" * 100).to_json())
    store = make(limits=StoreLimits(max_bytes=2 * one, max_response_bytes=one))
    assert not store.put("a", stored("r0", "x" * 101))
    assert all(store.put("a", stored(f"r{n}", "x" * 100)) for n in range(1, 5))
    assert len(store) == 2


def test_age_counts_from_the_last_use(make: Make) -> None:
    clock = Clock()
    store = make(limits=StoreLimits(max_age_s=10), clock=clock)
    store.put("a", stored("r1"))
    store.put("a", stored("r2"))
    clock.now += 9
    assert store.get("a", "r1")
    clock.now += 9
    assert store.get("a", "r1")
    assert store.get("a", "r2") is None
    assert not store.delete("a", "r2")


def test_threads_do_not_disturb_each_other(make: Make) -> None:
    store = make()
    seen: list[bool] = []

    def work(owner: str) -> None:
        for n in range(20):
            store.put(owner, stored(f"r{n}", owner))
            seen.append(store.get(owner, f"r{n}") == stored(f"r{n}", owner))

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 80
    assert len(store) == 80


def test_a_file_outlives_its_process_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store = SqliteResponseStore(path)
    store.put("a", stored("r1"))
    store.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert SqliteResponseStore(path).get("a", "r1") == stored("r1")


def test_no_name_is_special(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = SqliteResponseStore(":memory:")
    store.put("a", stored("r1"))
    store.close()
    assert SqliteResponseStore(":memory:").get("a", "r1") == stored("r1")


def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(b"not a database at all" * 100)
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not a database"):
        SqliteResponseStore(path)
    assert path.read_bytes() == before
    other = tmp_path / "someone.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE theirs (x)")
    db.close()
    with pytest.raises(StoreError, match="no store of responses"):
        SqliteResponseStore(other)
    with pytest.raises(StoreError):
        SqliteResponseStore(tmp_path / "missing" / "x.db")
    store = SqliteResponseStore(tmp_path / "closed.db")
    store.close()
    with pytest.raises(StoreError, match=r"closed\.db"):
        store.get("a", "r1")


def test_a_damaged_file_is_an_error_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"
    store = SqliteResponseStore(path)
    for n in range(50):
        store.put("a", stored(f"r{n}", "x" * 4000))
    store.close()
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    path.write_bytes(bytes(data))
    with pytest.raises(StoreError):
        SqliteResponseStore(path).put("a", stored("r99", "y" * 4000))


class BothStores(RuleBasedStateMachine):
    """Whatever is done, the store in memory and the store in a file agree."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.folder = tempfile.TemporaryDirectory()
        limits = StoreLimits(max_responses=4, max_bytes=900, max_response_bytes=400, max_age_s=20)
        self.stores: list[ResponseStore] = [
            MemoryResponseStore(limits, clock=self.clock),
            SqliteResponseStore(Path(self.folder.name) / "r.db", limits, clock=self.clock),
        ]

    def teardown(self) -> None:
        file = self.stores[1]
        assert isinstance(file, SqliteResponseStore)
        file.close()
        self.folder.cleanup()

    def both(self, ask: Callable[[ResponseStore], Any]) -> None:
        self.clock.now += 1
        memory, file = (ask(store) for store in self.stores)
        assert memory == file

    owners = st.sampled_from("ab")
    ids = st.sampled_from(["r1", "r2", "r3"])

    @rule(owner=owners, id=ids, size=st.integers(0, 400))
    def put(self, owner: str, id: str, size: int) -> None:
        self.both(lambda store: store.put(owner, stored(id, "x" * size)))

    @rule(owner=owners, id=ids)
    def get(self, owner: str, id: str) -> None:
        self.both(lambda store: store.get(owner, id))

    @rule(owner=owners, id=ids)
    def delete(self, owner: str, id: str) -> None:
        self.both(lambda store: store.delete(owner, id))

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds: int) -> None:
        self.clock.now += seconds

    @invariant()
    def limits_hold(self) -> None:
        memory = self.stores[0]
        assert isinstance(memory, MemoryResponseStore)
        assert len(memory) <= 4


TestBothStores = BothStores.TestCase
TestBothStores.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


# -- requests over a store -------------------------------------------------------------


def turn(
    kept: ResponseStore, id: str, given: Any, said: str, owner: str = "a", **more: Any
) -> Exchange:
    body = {"model": MODEL, "input": given, "reasoning": {"effort": "none"}, **more}
    exchange = Exchange("responses", body, id=id, created=7, store=kept, owner=owner)
    exchange.answer.text(said)
    exchange.answer.finish()
    return exchange


def test_the_next_request_goes_on_from_the_last(make: Make) -> None:
    store = make()
    first = turn(store, "r1", "My name is Ann.", "Hello Ann.")
    assert first.stored
    assert first.response()["store"] is True
    second = turn(store, "r2", "And mine Bob.", "Hi Bob.", previous_response_id="r1")
    assert second.response()["previous_response_id"] == "r1"
    third = turn(
        store, "r3", [{"role": "user", "content": "Who?"}], "Both.", previous_response_id="r2"
    )
    whole = [
        {"role": "user", "content": "My name is Ann."},
        {"role": "assistant", "content": "Hello Ann."},
        {"role": "user", "content": "And mine Bob."},
        {"role": "assistant", "content": "Hi Bob."},
        {"role": "user", "content": "Who?"},
    ]
    body = {"model": MODEL, "input": whole, "reasoning": {"effort": "none"}}
    assert third.prompt == Exchange("responses", body, id="x").prompt


TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}
CALL = (
    'Wait.</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="add">\n'
    '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    "</｜DSML｜ calls>"
)


def test_a_tool_loop_sends_only_the_results_and_keeps_the_reasoning(make: Make) -> None:
    store = make()
    more = {"tools": [TOOL], "reasoning": {"effort": "high"}}
    first = turn(store, "r1", "1 + 1?", CALL, **more)
    call = first.response()["output"][-1]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    second = turn(store, "r2", [output], "Two.", previous_response_id="r1", **more)
    assert second.prompt.startswith(first.prompt + "Wait.</think>")
    assert "<tool_result>2</tool_result>" in second.prompt
    with pytest.raises(RecipeError, match="No tool output found"):
        turn(store, "r3", "And?", "", previous_response_id="r1", **more)


def test_a_reference_stands_for_an_item_of_a_kept_answer(make: Make) -> None:
    store = make()
    more = {"tools": [TOOL], "reasoning": {"effort": "high"}}
    asked = {"role": "user", "content": "1 + 1?"}
    kept = turn(store, "resp_1_2", [asked], CALL, **more).response()["output"]
    result = {"type": "function_call_output", "call_id": kept[-1]["call_id"], "output": "2"}
    references = [{"type": "item_reference", "id": item["id"]} for item in kept]
    by_reference = turn(store, "r2", [asked, *references, result], "Two.", **more)
    assert by_reference.prompt == turn(store, "r3", [asked, *kept, result], "Two.", **more).prompt
    assert by_reference.ignored_fields == ()
    going_on = turn(store, "r4", "Sure?", "Yes.", previous_response_id="r2", **more)
    assert going_on.prompt.startswith(by_reference.prompt + "Two.")
    for owner, wanted in [("b", references[0]), ("a", {"type": "item_reference", "id": "fc_x_0"})]:
        with pytest.raises(RecipeError, match="not found") as caught:
            turn(store, "r5", [asked, wanted], "", owner=owner)
        status, body = error_response("responses", caught.value)
        assert (status, body["error"]["param"]) == (404, "input[1].id")
    for bad in ({"type": "item_reference"}, {"type": "item_reference", "id": 7}):
        with pytest.raises(RecipeError, match="not found"):
            turn(store, "r6", [asked, bad], "")
    # Where nothing is kept it is passed over, and told: the AI SDK refers to thoughts and texts,
    # and sends calls whole.
    body = {"model": MODEL, "input": [asked, references[0], kept[-1], result], **more}
    assert Exchange("responses", body).ignored_fields == ("input.item_reference",)


def test_what_is_not_there_is_a_404_that_names_the_field(make: Make) -> None:
    store = make()
    turn(store, "r1", "x", "y")
    for owner, previous in [("a", "r9"), ("b", "r1")]:
        with pytest.raises(RecipeError) as caught:
            turn(store, "r2", "x", "", owner=owner, previous_response_id=previous)
        status, body = error_response("responses", caught.value)
        assert status == 404
        assert body["error"]["param"] == "previous_response_id"
        assert body["error"]["code"] == "previous_response_not_found"


def test_deleting_an_answer_breaks_what_builds_on_it(make: Make) -> None:
    store = make()
    turn(store, "r1", "x", "y")
    turn(store, "r2", "x", "y", previous_response_id="r1")
    store.delete("a", "r1")
    with pytest.raises(RecipeError, match=r"'r1', which 'r2' continues"):
        turn(store, "r3", "x", "y", previous_response_id="r2")


def test_store_false_keeps_nothing_and_wrong_types_are_named(make: Make) -> None:
    store = make()
    exchange = turn(store, "r1", "x", "y", store=False)
    assert not exchange.stored
    assert exchange.response()["store"] is False
    assert store.get("a", "r1") is None
    for name, value in [("store", "yes"), ("previous_response_id", 3)]:
        with pytest.raises(RecipeError, match=f"{name}: expected"):
            turn(store, "r2", "x", "y", **{name: value})


def test_without_a_store_going_on_is_refused_and_in_parity_ignored() -> None:
    body = {"model": MODEL, "input": "x", "previous_response_id": "r1"}
    with pytest.raises(RecipeError, match="keeps no responses"):
        Exchange("responses", body, id="x")
    parity = Exchange("responses", body, id="x", profile="parity", store=MemoryResponseStore())
    assert (
        parity.prompt
        == Exchange("responses", {**body, "previous_response_id": None}, id="x").prompt
    )


def test_input_items_are_listed_page_by_page(make: Make) -> None:
    store = make()
    turn(store, "r1", [{"role": "user", "content": str(n)} for n in range(5)], "y")
    kept = store.get("a", "r1")
    assert kept is not None
    page = input_item_list(kept, limit=2)
    assert [item["content"] for item in page["data"]] == ["4", "3"]
    assert page["has_more"]
    rest = input_item_list(kept, limit=9, after=page["last_id"])
    assert [item["content"] for item in rest["data"]] == ["2", "1", "0"]
    assert not rest["has_more"]
    assert input_item_list(kept, order="asc")["data"][0]["content"] == "0"
    for wrong in ({"limit": 0}, {"order": "up"}, {"after": "nobody"}):
        with pytest.raises(RecipeError, match=next(iter(wrong))):
            input_item_list(kept, **wrong)  # type: ignore[arg-type]


def test_paging_ends_where_a_client_gave_an_id_twice(make: Make) -> None:
    store = make()
    items = [{"role": "user", "content": str(n), "id": "same"} for n in range(3)]
    turn(store, "r1", items, "y")
    kept = store.get("a", "r1")
    assert kept is not None
    seen: list[str] = []
    after = None
    for _ in items:
        page = input_item_list(kept, limit=1, after=after, order="asc")
        seen += [item["content"] for item in page["data"]]
        after = page["last_id"]
    assert (seen, page["has_more"]) == (["0", "1", "2"], False)


def test_metadata_comes_back() -> None:
    exchange = turn(MemoryResponseStore(), "r1", "x", "y", metadata={"job": "7"})
    assert exchange.response()["metadata"] == {"job": "7"}


def test_one_owner_cannot_push_out_what_another_keeps(make: Make) -> None:
    limits = StoreLimits(max_responses=20, max_owner_responses=8)
    store = make(limits=limits)
    assert store.put("alice", stored("a"))
    for owner in ("mallory", "mallet", "trudy"):
        for number in range(30):
            assert store.put(owner, stored(f"{owner}{number}"))
    assert store.get("alice", "a") is not None
    assert len(store) == 20
    # Their own newest are there: a share is a share for everybody.
    for owner in ("mallory", "mallet", "trudy"):
        assert store.get(owner, f"{owner}29") is not None
        assert store.get(owner, f"{owner}0") is None


def test_bytes_count_against_the_owners_share_too(make: Make) -> None:
    size = len(stored("a", "x" * 100).to_json())
    store = make(limits=StoreLimits(max_owner_bytes=2 * size, max_bytes=100 * size))
    store.put("alice", stored("a"))
    for number in range(5):
        store.put("mallory", stored(str(number), "x" * 100))
    kept = [str(n) for n in range(5) if store.get("mallory", str(n)) is not None]
    assert kept == ["3", "4"]
    assert store.get("alice", "a") is not None


def test_a_deleted_answer_is_in_no_file_any_more(tmp_path: Path) -> None:
    clock = Clock()
    with SqliteResponseStore(tmp_path / "r.db", StoreLimits(max_age_s=10), clock=clock) as store:
        for gone in ("deleted", "expired"):
            store.put("alice", stored(gone, f"SECRET-{gone}"))
        assert store.delete("alice", "deleted")
        clock.now += 11
        store.put("alice", stored("new", "KEPT"))
        held = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {"r.db", "r.db-wal"} <= set(held)
    assert not [name for name, data in held.items() if b"SECRET-" in data]


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    SqliteResponseStore(path).close()
    path.chmod(0o644)
    SqliteResponseStore(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_store_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "r.db"
    with SqliteResponseStore(path) as store:
        store.put("alice", stored("a"))
    old = sqlite3.connect(path)
    old.executescript("DROP INDEX responses_by_owner; PRAGMA user_version = 1")
    old.close()
    with SqliteResponseStore(path) as store:
        assert store.get("alice", "a") is not None
