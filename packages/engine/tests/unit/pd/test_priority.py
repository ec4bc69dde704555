"""A decode worker serves by class: those who wait, and those who run where there is no place."""

from __future__ import annotations

from toy_engine import LONG_TOKENS, alone, ask, cluster, greedy, hear, prompt, request, run, toy

from deepinfer_engine.core.config import EngineConfig

ONE_PLACE = EngineConfig(max_num_seqs=1)


def test_an_urgent_request_takes_the_place_of_one_that_runs_and_gives_it_back():
    async def body():
        low, urgent = prompt(1, 20), prompt(2, 20)
        long, short = greedy(LONG_TOKENS, ignore_eos=True, priority=1), greedy(5, ignore_eos=True)
        async with cluster(
            decode_config=ONE_PLACE, decode_runner=lambda: toy(num_blocks=600)
        ) as it:
            stream = it.engine.generate(request("low", low, long))
            said = await hear(stream, 3)
            answer = await ask(it.engine, request("urgent", urgent, short))
            assert answer.tokens == alone(urgent, short)
            counters, _ = it.decodes[0].service.loop.snapshot()
            assert counters["urgent_preemptions"] == counters["parked"] == 1
            said += await hear(stream, 20)
            tokens = [token for event in said for token in event.token_ids]
            enough = greedy(len(tokens), ignore_eos=True)
            assert tokens == alone(low, enough)
            await stream.aclose()

    run(body())
