"""A GGUF file as a checkpoint directory: what it says of model and tokenizer, as the usual files.

The text of a GGUF is slow to parse, so it is done once: `opened` writes config.json,
tokenizer.json, tokenizer_config.json and an index of the tensors into a directory of the user's
cache, beside a link to the weights. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_engine.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import pre_tokenizers as pre

VERSION = 1
INDEX = "gguf_index.json"
WEIGHTS = "model.gguf"

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_CONTROL, _USER_DEFINED = 3, 4
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """`shape` as torch has it, outermost first; the data lie at `offset` of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def opened(file: Path, home: Path) -> Path:
    """The checkpoint directory of a GGUF file, made under `home` at the first call.

    Raises CheckpointError naming the file: it cannot be read, holds a model that does not run here,
    a tensor type or a tokenizer that nothing here reads.
    """
    file = file.resolve()
    stat = file.stat()
    key = f"{VERSION} {file} {stat.st_size} {stat.st_mtime_ns}"
    name = f"{file.stem}-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}"
    directory = home / name
    if not (directory / INDEX).is_file():
        describe(file, directory, link=True)
    return directory


def describe(
    file: Path, directory: Path, *, link: bool, sampling: Mapping[str, float] | None = None
) -> None:
    """Write the files of a checkpoint directory.

    link: with a link to the weights. sampling: defaults to stand in its generation_config.json.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    except OSError as error:
        raise CheckpointError(f"{directory.parent}: cannot be written ({error.strerror})") from None
    try:
        described = _described(file)
        described["generation_config.json"] |= sampling or {}
        for name, value in described.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            (made / name).write_text(text, encoding="utf-8")
        if link:
            (made / WEIGHTS).symlink_to(file)
            try:
                os.replace(made, directory)
            except OSError:  # another process was first, and wrote the same
                if not (directory / INDEX).is_file():
                    raise
        else:
            directory.mkdir(exist_ok=True)
            for part in made.iterdir():
                os.replace(part, directory / part.name)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written ({error.strerror})") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _described(file: Path) -> dict[str, Any]:
    """File name -> content (text, or a value to write as JSON)."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = [
            StoredTensor(
                t.name,
                t.tensor_type.name,
                tuple(int(n) for n in reversed(t.shape.tolist())),
                int(t.data_offset),
                int(t.n_bytes),
            )
            for t in reader.tensors
        ]
    except Exception as error:  # the package raises ValueError, IndexError, KeyError, OSError
        raise CheckpointError(
            f"{file}: not a readable GGUF file, or one cut short ({error}); get it again"
        ) from None
    size = file.stat().st_size
    cut = next((t for t in tensors if t.offset + t.nbytes > size), None)
    if cut is not None:
        raise CheckpointError(
            f"{file}: ends inside tensor {cut.name}: {size} bytes of at least "
            f"{cut.offset + cut.nbytes}; get it again"
        )
    odd = sorted({t.kind for t in tensors} - set(READABLE))
    if odd:
        raise CheckpointError(
            f"{file}: holds tensors of type {', '.join(odd)}; readable are {', '.join(READABLE)}"
        )
    config = _config(file, fields, {t.name: t for t in tensors})
    beside = file.with_name("tokenizer.json")
    out: dict[str, Any] = {
        "config.json": config,
        "tokenizer.json": beside.read_text(encoding="utf-8")
        if beside.is_file()
        else _tokenizer_json(file, fields),
        "tokenizer_config.json": _tokenizer_config(fields),
        "generation_config.json": {"eos_token_id": config["eos_token_id"]},
        INDEX: {
            "version": VERSION,
            "architecture": fields["general.architecture"],
            "heads": [config["num_attention_heads"], config["num_key_value_heads"]],
            "tensors": [asdict(t) for t in tensors],
        },
    }
    return out


def _config(file: Path, fields: dict[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, Any]:
    name = fields.get("general.architecture")
    if name not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file}: general.architecture is {name!r}; these run here: {', '.join(_ARCHITECTURES)}"
        )

    def key(path: str, default: Any = None) -> Any:
        found = fields.get(f"{name}.{path}", default)
        if found is None:
            raise CheckpointError(f"{file}: the key {name}.{path} is missing")
        return found

    heads = key("attention.head_count")
    width = key("embedding_length")
    config = {
        "architectures": [_ARCHITECTURES[name]],
        "model_type": name,  # what transformers' tools ask for
        "hidden_size": width,
        "num_hidden_layers": key("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key("attention.head_count_kv", heads),
        "head_dim": key("attention.key_length", width // heads),
        "intermediate_size": key("feed_forward_length"),
        "max_position_embeddings": key("context_length"),
        "rms_norm_eps": key("attention.layer_norm_rms_epsilon"),
        "rope_theta": key("rope.freq_base", 10000.0),
        "vocab_size": len(fields.get("tokenizer.ggml.tokens", ())) or key("vocab_size"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _ends(fields),
    }
    if name in ("llama", "mistral"):
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    scaling = fields.get(f"{name}.rope.scaling.type")
    if "rope_freqs.weight" in tensors:
        stored = tensors["rope_freqs.weight"]
        config["rope_scaling"] = {
            "rope_type": "factors",
            "frequency_factors": _floats(file, stored),
        }
    elif scaling not in (None, "none"):
        original = fields.get(f"{name}.rope.scaling.original_context_length")
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": key("rope.scaling.factor"),
            **({"original_max_position_embeddings": original} if original else {}),
        }
    return config


def _floats(file: Path, stored: StoredTensor) -> list[float]:
    import numpy as np

    if stored.kind != "F32":
        raise CheckpointError(f"{file}: {stored.name} is {stored.kind}, wanted F32")
    return np.fromfile(file, dtype="<f4", count=stored.nbytes // 4, offset=stored.offset).tolist()


def _ends(fields: dict[str, Any]) -> list[int]:
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({int(fields[n]) for n in names if n in fields})


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields.get("tokenizer.ggml.tokens", [])
    out: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name in ("bos", "eos", "unknown", "padding"):
        at = fields.get(f"tokenizer.ggml.{name}_token_id")
        if at is not None and at < len(tokens):
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            out[f"{short}_token"] = tokens[at]
    out["add_bos_token"] = bool(fields.get("tokenizer.ggml.add_bos_token", False))
    if template := fields.get("tokenizer.chat_template"):
        out["chat_template"] = template
    return out


def _tokenizer_json(file: Path, fields: dict[str, Any]) -> str:
    """The byte-level BPE of the file. Raises CheckpointError for another kind."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(
            f"{file}: its tokenizer is of kind {kind!r}, readable is the byte-level BPE ('gpt2'); "
            "put the model's tokenizer.json beside the file"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ", 1)) for m in fields.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[(a, b) for a, b in merges],
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(file, fields.get("tokenizer.ggml.pre", "default"))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    for token, token_kind in zip(tokens, kinds, strict=False):
        if token_kind in (_CONTROL, _USER_DEFINED):
            special = token_kind == _CONTROL
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=special)])
    return tokenizer.to_str()


def _pre_tokenizer(file: Path, name: str) -> pre.PreTokenizer:
    """How text is cut before merging, by the name that GGUF files give it."""
    from tokenizers import Regex
    from tokenizers import pre_tokenizers as pre

    def split(pattern: str) -> pre.PreTokenizer:
        return pre.Sequence(
            [
                pre.Split(Regex(pattern), behavior="isolated"),
                pre.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    if name == "smollm":
        return pre.Sequence(
            [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
        )
    if name in ("default", "gpt-2"):
        return pre.ByteLevel(add_prefix_space=False)
    if name in ("llama-bpe", "llama3", "llama-v3"):
        return split(_LLAMA3)
    if name in ("qwen2", "deepseek-r1-qwen"):
        return split(_QWEN2)
    raise CheckpointError(
        f"{file}: tokenizer.ggml.pre is {name!r}, readable are smollm, gpt-2, llama-bpe and qwen2; "
        "put the model's tokenizer.json beside the file"
    )
