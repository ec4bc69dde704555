"""The demo tokenizer: byte-level BPE with the V4.1 special tokens in their exact spelling."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer_recipe import SpecialToken

VOCABULARY = 1536
PAD = "<｜▁pad▁｜>"  # noqa: RUF001
NOISE = "<｜draft▁noise｜>"  # noqa: RUF001 # fills the draft block behind its anchor
# Single digits, words with their leading space, runs of punctuation, runs of white space.
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def special_tokens() -> list[str]:
    """BOS, EOS and PAD are 0, 1 and 2 as in the real files; the rest follow."""
    first = [SpecialToken.Bos.value, SpecialToken.Eos.value, PAD]
    return first + [t.value for t in SpecialToken if t.value not in first] + [NOISE]


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """`texts` are the pieces between special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in special_tokens()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(
            f"the tokenizer has {tokenizer.get_vocab_size()} entries, wanted {VOCABULARY}: "
            "train it on more text"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SpecialToken.Bos.value,
        "eos_token": SpecialToken.Eos.value,
        "pad_token": PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    text = json.dumps(config, ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
