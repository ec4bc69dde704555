"""A rank that votes over gloo: `voter.py RANK SIZE STORE STEPS FATE`; prints JSON.

FATE is what the last rank does behind so many steps: `kill` or `stop` itself.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from random import Random

from toy_engine import Recorder, alone, greedy, prompt, request, toy

from deepinfer_engine.core.config import EngineConfig
from deepinfer_engine.core.votes import Vote
from deepinfer_engine.core.voting_loop import VotingLoop
from deepinfer_engine.errors import EngineLost
from deepinfer_engine.kv.parking import HostParking
from deepinfer_engine.parallel import network
from deepinfer_engine.parallel.ballot import GlooBallot

MEETING_S, DEADLINE_S = 60.0, 10.0


def main() -> None:
    rank, size, steps = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    store, fate, random = sys.argv[3], sys.argv[5], Random(rank)
    network.join(store, rank, size, DEADLINE_S if fate == "stop" else MEETING_S)
    runner, sink = toy(nextn=2), Recorder()
    loop = VotingLoop(
        runner,
        EngineConfig(max_gap=0.0, max_num_seqs=3),
        "both",
        parking=HostParking(runner, 1 << 20),
        link=None,
        sink=sink,
        ballot=GlooBallot(),
        vote=Vote(size),
    )
    seen: list[object] = []
    asked: dict[str, tuple[int, ...]] = {}
    lost = ""
    for n in range(10 * steps):
        if n == steps and rank == size - 1:
            print(json.dumps({"seen": seen, "wrong": [], "lost": ""}), flush=True)
            os.kill(os.getpid(), signal.SIGKILL if fate == "kill" else signal.SIGSTOP)
        if n < steps and random.random() < 0.3:
            asked[f"r{n}"] = prompt(100 * rank + n, random.randint(1, 40))
            loop.submit(request(f"r{n}", asked[f"r{n}"], greedy(8)), f"r{n}", n / 10)
        if random.random() < 0.1:
            time.sleep(0.02)  # others wait for it
        try:
            loop.step(n / 10)
        except EngineLost as error:
            lost = str(error)
            break
        tally = loop.tally
        seen.append([loop.kind, tally.want, tally.busy, tally.urgent, loop.sums])
    wrong = [name for name in sink.ends if sink.tokens[name] != alone(asked[name], greedy(8))]
    print(json.dumps({"seen": seen, "wrong": wrong, "lost": lost, "ends": len(sink.ends)}))
    sys.stdout.flush()
    os._exit(0)  # the group is broken: nobody is said goodbye to


if __name__ == "__main__":
    main()
