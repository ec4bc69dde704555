"""Batches of packed conversations, each a pure function of (seed, step)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from corpus import documents
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer_recipe import TrainingText

ANSWER, CONTEXT = 2, 1
PAD_ID = 2


def pieces(seed: int, count: int) -> Iterator[str]:
    """Text between special tokens, for the tokenizer's training."""
    for mix, room in (("short", 512), ("long", 2048)):
        stream = documents(f"{seed}-tokenizer", False, room, mix)
        for _ in range(count):
            _, text = next(stream)
            at = 0
            for start, end in text.special_ranges:
                if start > at:
                    yield text.text[at:start]
                at = end


def encode(tokenizer: Tokenizer, text: TrainingText) -> tuple[list[int], list[int]]:
    """Ids and, for each, ANSWER where the model has to write it and CONTEXT elsewhere.

    The corpus never spells a special token by accident, so one call gives what encoding the
    pieces between the special ranges gives.
    """
    encoded = tokenizer.encode(text.text, add_special_tokens=False)
    kinds, targets, t = [], text.target_ranges, 0
    # the first token of a target is <think> or </think>: the prompt gives it
    for start, _ in encoded.offsets:
        while t < len(targets) and start >= targets[t][1]:
            t += 1
        kinds.append(ANSWER if t < len(targets) and start >= targets[t][0] else CONTEXT)
    return encoded.ids, kinds


@dataclass
class Batch:
    """Rows of T + 1 tokens; `kinds[:, i]` speaks of token i."""

    ids: Tensor
    kinds: Tensor

    @property
    def inputs(self) -> Tensor:
        return self.ids[:, :-1]

    @property
    def targets(self) -> Tensor:
        return self.ids[:, 1:]

    @property
    def target_kinds(self) -> Tensor:
        return self.kinds[:, 1:]


def batch(
    tokenizer: Tokenizer, key: str, rows: int, length: int, mix: str, held_out: bool = False
) -> Batch:
    """Pack conversations into rows that each begin with one; the last of a row may be cut."""
    stream = documents(key, held_out, length, mix)
    ids = torch.full((rows, length + 1), PAD_ID)
    kinds = torch.zeros_like(ids)
    waiting: tuple[list[int], list[int]] | None = None
    for row in range(rows):
        at = 0
        while at <= length:
            tokens, marks = waiting or encode(tokenizer, next(stream)[1])
            room, waiting = length + 1 - at, None
            if len(tokens) > room and at > 0 and room < length // 4:
                waiting = (tokens, marks)  # too little is left: it opens the next row
                break
            n = min(len(tokens), room)
            ids[row, at : at + n] = torch.tensor(tokens[:n])
            kinds[row, at : at + n] = torch.tensor(marks[:n])
            at += n
    return Batch(ids, kinds)
