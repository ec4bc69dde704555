"""The process that tries grammars out: a schema that takes too long dies with it.

    python -m deepinfer_recipe.grammar.worker

Messages on both pipes are a length (u32, little endian) and that many bytes of JSON. First comes
the vocabulary, answered when the library is loaded; then one grammar at a time. What it compiled
stays here: as text, the only form that the library can write, a grammar takes longer to hand over
than to compile once more where it is used.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from pathlib import Path
from typing import IO, Any

from deepinfer_recipe.base.errors import GrammarError, RecipeError

LENGTH = struct.Struct("<I")


def write_message(pipe: IO[bytes], message: dict[str, Any]) -> None:
    """Send one message. Raises OSError when nobody reads."""
    data = json.dumps(message).encode()
    pipe.write(LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next message, None at the end of the pipe."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = pipe.read(size)
    return json.loads(data) if len(data) == size else None


def _limit_memory(more_bytes: int) -> None:
    """Let the address space grow by this much over what the libraries have mapped."""
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = mapped * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> int:
    """Serve until the pipe ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    setup = read_message(source)
    if setup is None:
        return 0
    try:
        from deepinfer_recipe.grammar.compile import GrammarVocabulary, compile_grammar

        vocabulary = GrammarVocabulary.deserialize(setup["vocabulary"])
    except RecipeError as error:
        write_message(sink, {"unavailable": str(error)})
        return 1
    _limit_memory(setup["memory_bytes"])
    write_message(sink, {})
    while (request := read_message(source)) is not None:
        # The kernel's own clock: it ends this process even if nobody is left to kill it.
        signal.setitimer(signal.ITIMER_REAL, request["alarm_s"])
        try:
            compile_grammar(request["grammar"], vocabulary)
            answer: dict[str, Any] = {}
        except GrammarError as error:
            answer = {"invalid": str(error)}
        except MemoryError:
            return 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(sink, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
