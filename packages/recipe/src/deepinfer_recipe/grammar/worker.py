"""The process that tries grammars out: a schema that takes too long dies with it.

    python -m deepinfer_recipe.grammar.worker

Messages on both pipes are a length (u32, little endian) and that many bytes of JSON. First come
the limits and, as bytes of that length form, the vocabulary, answered when the library is loaded;
then one grammar at a time. What it compiled stays here: as text, the only form that the library can
write, a grammar takes far longer to hand over than to compile once more where it is used.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from deepinfer_recipe.base.errors import GrammarError, GrammarUnavailable, RecipeError

if TYPE_CHECKING:
    from deepinfer_recipe.grammar.compile import GrammarVocabulary

LENGTH = struct.Struct("<I")


def write_message(pipe: IO[bytes], message: dict[str, Any]) -> None:
    """Send one message. Raises OSError when nobody reads."""
    write_bytes(pipe, json.dumps(message).encode())


def write_bytes(pipe: IO[bytes], data: bytes) -> None:
    """Send bytes as they are. Raises OSError when nobody reads."""
    pipe.write(LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def read_message(pipe: IO[bytes]) -> dict[str, Any] | None:
    """The next message, None at the end of the pipe."""
    data = read_bytes(pipe)
    return None if data is None else json.loads(data)


def read_bytes(pipe: IO[bytes]) -> bytes | None:
    """The next message as bytes, None at the end of the pipe."""
    head = pipe.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    data = pipe.read(size)
    return data if len(data) == size else None


def _limit_memory(more_bytes: int) -> None:
    """Let the address space grow by this much over what the libraries have mapped."""
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = mapped * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


_MOST_CPU_S = 1.0
"""For all masks of a grammar's doubtful parts: a single one takes a small part of that."""
_WITH_TORCH = "--with-torch"


def _load() -> None:
    """Import the library without torch, or start again where this release cannot be had so."""
    from deepinfer_recipe.grammar import library

    if _WITH_TORCH in sys.argv:
        library.library()
        return
    try:
        library.library_without_torch()
    except GrammarUnavailable:
        raise
    except Exception:
        # Half imported; nothing has been read from the pipe yet.
        again = [sys.executable, "-m", "deepinfer_recipe.grammar.worker", _WITH_TORCH]
        os.execv(sys.executable, again)


def main() -> int:
    """Serve until the pipe ends."""
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        _load()
        from deepinfer_recipe.grammar.compile import GrammarVocabulary, compile_grammar
    except RecipeError as error:
        write_message(sink, {"unavailable": str(error)})
        return 1
    setup, packed = read_message(source), read_bytes(source)
    if setup is None or packed is None:
        return 0
    vocabulary = GrammarVocabulary.deserialize(packed)
    _limit_memory(setup["memory_bytes"])
    write_message(sink, {})
    while (request := read_message(source)) is not None:
        # The kernel's own clock: it ends this process even if nobody is left to kill it.
        signal.setitimer(signal.ITIMER_REAL, request["alarm_s"])
        try:
            compile_grammar(request["grammar"], vocabulary)
            answer: dict[str, Any] = {"ahead": _tried_out(request["grammar"], vocabulary)}
        except GrammarError as error:
            answer = {"invalid": str(error)}
        except MemoryError:
            return 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(sink, answer)
    return 0


def _tried_out(text: str, vocabulary: GrammarVocabulary) -> bool:
    """Whether all masks of a grammar must be made ahead, as one of them may take too long.

    Then they have been made here, within the time that a grammar may take.
    """
    from deepinfer_recipe.grammar.compile import compile_grammar
    from deepinfer_recipe.grammar.costs import doubtful_parts

    began = time.process_time()
    for part in doubtful_parts(text):
        compile_grammar(part, vocabulary, ahead=True)
        if time.process_time() - began > _MOST_CPU_S:
            compile_grammar(text, vocabulary, ahead=True)
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
