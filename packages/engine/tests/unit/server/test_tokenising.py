"""Long texts are tokenised in a process that ends with whoever asked."""

from __future__ import annotations

import asyncio
import os

import pytest
from server_fakes import byte_tokenizer_json

from deepinfer_engine.codec.errors import ContextLengthExceeded, InvalidRequest
from deepinfer_engine.codec.recipe_codec import RecipeCodec, longest_token_bytes
from deepinfer_engine.server import services as services_module
from deepinfer_engine.server.tokenising import TokeniserProcesses
from deepinfer_recipe import SpecialToken, Tokenizer


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(byte_tokenizer_json())
    return file


@pytest.fixture
def processes(path):
    it = TokeniserProcesses(path, processes=1)
    yield it
    it.close()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_of_its_own_gives_the_same_ids(path, processes):
    here = Tokenizer.from_file(str(path))
    text = f"Sphinx \N{SNOWMAN} {SpecialToken.User.value} of black quartz"

    async def go():
        async with processes.job("a") as job:
            assert job.encode(text, None) == here.encode(text)
            start = text.index("<")
            ranges = [(start, text.index(">") + 1)]
            assert job.encode(text, ranges) == here.encode_prompt(text, ranges)
            with pytest.raises(InvalidRequest):
                job.encode("no special", [(0, 3)])
            assert len(processes._all) == 1

    asyncio.run(go())


def test_a_process_that_read_much_is_ended_and_its_memory_returned(processes):
    async def go():
        async with processes.job("a") as job:
            job.encode("a", None)
            (child,) = processes._all
            job.encode("a" * 1_100_000, None)
            assert not alive(child._process.pid)
            assert not processes._all
            assert job.encode("b", None)

    asyncio.run(go())


def test_a_text_beyond_the_memory_of_a_process_is_refused_and_the_next_served(path):
    small = TokeniserProcesses(path, processes=1, memory_bytes=900 << 20)

    async def go():
        async with small.job("a") as job:
            with pytest.raises(InvalidRequest, match="memory"):
                job.encode("ab " * 12_000_000, None)
            assert job.encode("a", None)

    try:
        asyncio.run(go())
    finally:
        small.close()


def test_leaving_ends_the_process_that_works(processes, monkeypatch):
    """The thread comes back at once, although the text would have taken long."""

    async def go():
        from deepinfer_engine.server.services import Services

        async with processes.job("a") as job:
            job.encode("warm", None)
        (child,) = processes._all
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()
        real = type(child).ask

        def ask(self, message):
            loop.call_soon_threadsafe(asked.set)
            return real(self, message)

        monkeypatch.setattr(type(child), "ask", ask)
        services = Services.__new__(Services)
        services.threads = services_module.ThreadPoolExecutor(1)
        services.tokenisers = processes
        work = asyncio.create_task(
            services.off_loop(
                lambda job: job.encode("ab " * 3_000_000, None), size=1 << 20, caller="a"
            )
        )
        await asked.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert not alive(child._process.pid)
        services.threads.shutdown()

    asyncio.run(go())


def test_a_prompt_that_no_context_can_hold_is_refused_by_its_bytes(path, monkeypatch):
    codec = RecipeCodec(Tokenizer.from_file(str(path)), ("toy",))
    longest = longest_token_bytes(Tokenizer.from_file(str(path)))

    def never(self, *args):
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(Tokenizer, "encode_prompt", never)
    body = b'{"model": "toy", "messages": [{"role": "user", "content": "%s"}]}'
    with pytest.raises(ContextLengthExceeded, match=f"at most {64 * longest}"):
        codec.prepare("chat", body % (b"fox " * 16 * longest), 64)
    with pytest.raises(AssertionError):
        codec.prepare("chat", body % b"fox", 64)


def test_a_body_of_a_text_model_has_a_bound_of_its_own(path):
    codec = RecipeCodec(Tokenizer.from_file(str(path)), ("toy",))
    assert codec.body_bytes(64) == 6 * 64 * longest_token_bytes(codec.tokenizer) + (1 << 20)


def test_a_tokenizer_that_changes_the_text_first_has_no_bound(path):
    import tokenizers
    from tokenizers.normalizers import NFC

    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.normalizer = NFC()
    assert longest_token_bytes(Tokenizer(backend)) is None
