"""What `LLM.generate` refuses before it asks the engine."""

from __future__ import annotations

import pytest

from deepinfer_engine import LLM, RequestError


def test_a_loose_token_among_prompts_and_a_closed_engine_are_refused() -> None:
    llm = LLM(num_blocks=16, max_num_seqs=1)
    try:
        with pytest.raises(RequestError, match="token 5 stands beside"):
            llm.generate(["a", 5])  # type: ignore[list-item]
    finally:
        llm.close()
    with pytest.raises(RequestError, match="closed"):
        llm.generate("a")
