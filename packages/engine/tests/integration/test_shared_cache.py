"""Several prefill workers on one cache directory, and what of a request reaches the cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

BLOCK = 128
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of a thing.",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}},
    },
}


def ask(text, **more):
    body = {
        "model": "deepinfer-demo",
        "temperature": 0,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": text}],
    }
    return {**body, **more}


def answered(server, body, **kwargs):
    reply = server.post("/v1/chat/completions", body, **kwargs)
    assert reply.status_code == 200, reply.text
    return reply.json()


def usage(answer):
    """(prompt tokens, cached tokens)"""
    found = answer["usage"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]


def of_workers(server, *names):
    """For each prefill worker, the sum of these of its metrics."""
    return {
        worker["name"]: sum(
            server.metric(f"deepinfer_worker_{name}_total", worker=worker["name"]) for name in names
        )
        for worker in server.health()["workers"]
        if worker["role"] == "prefill"
    }


def computed(server):
    return of_workers(server, "prefix_put_blocks")


def hits(server):
    return of_workers(server, "prefix_hit_tokens_host", "prefix_hit_tokens_disk")


def first_prompt_for(server, until, worker, system, numbers):
    """A prompt that this worker alone has computed: affinity decides who does."""
    for number in numbers:
        before = computed(server)
        text = f"Story {number}. {system}"
        prompt, cached = usage(answered(server, ask(text)))
        assert cached == 0

        # Workers report to the router a little later.
        def reported(before=before, prompt=prompt):
            now = computed(server)
            fresh = {w for w in now if now[w] - before[w] == prompt // BLOCK}
            return fresh if sum(now.values()) - sum(before.values()) == prompt // BLOCK else None

        if until(reported) == {worker}:
            return text, prompt
    raise AssertionError(f"no prompt went to {worker}")


def test_each_prefill_worker_hits_blocks_that_the_other_computed(
    start, until, tmp_path, system_prompt
):
    server = start("--prefill-workers", "2", cache_dir=tmp_path / "kv").wait_ready()
    one, two = sorted(computed(server))
    numbers = iter(range(100))
    for owner, other in ((one, two), (two, one)):
        text, prompt = first_prompt_for(server, until, owner, system_prompt, numbers)
        before = hits(server)
        whole = (prompt - 1) // BLOCK * BLOCK

        def other_was_asked(text=text, prompt=prompt, whole=whole, other=other, before=before):
            # Several at a time: affinity gives way to balance, so that both workers are asked.
            with ThreadPoolExecutor(4) as threads:
                answers = list(threads.map(lambda _: answered(server, ask(text)), range(4)))
            # Equal prompts that meet in one worker are read once: all but the last token is shared.
            assert {usage(answer)[1] for answer in answers} <= {whole, prompt - 1}
            assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
            return hits(server)[other] > before[other]

        until(other_was_asked, 60)


def test_user_key_and_tools_of_a_request_reach_the_cache(start, tmp_path, system_prompt):
    keys = tmp_path / "keys"
    keys.write_text("a:secret-a\nb:secret-b\n")
    keys.chmod(0o600)
    cache = tmp_path / "kv"
    server = start("--api-key-file", str(keys), cache_dir=cache).wait_ready()

    def cached(key, body):
        headers = {"authorization": f"Bearer secret-{key}"}
        return usage(answered(server, body, headers=headers))[1]

    plain = ask(system_prompt)
    assert cached("a", plain) == 0
    assert cached("a", plain) > 0
    assert cached("b", plain) == 0, "another key"
    assert cached("a", {**plain, "user": "u1"}) == 0, "another user of the same key"
    assert cached("a", {**plain, "user": "u1"}) > 0
    assert cached("b", {**plain, "user": "u1"}) == 0, "a user belongs to its key"

    def classes():
        return {path.name.split("-")[1] for path in cache.rglob("seg-*.kvs")}

    assert classes() == {"chat"}
    assert cached("a", {**plain, "tools": [TOOL]}) == 0
    assert server.get("/health").status_code == 200
    assert classes() == {"chat", "agent"}
