"""`deepinfer model`: look at a checkpoint without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_engine.cli.options import Json

if TYPE_CHECKING:
    from rich.table import Table

    from deepinfer_engine.model.v41.config import ModelConfig

model_app = typer.Typer(help="Look at a checkpoint.", no_args_is_help=True)

_CONTEXTS = [4096, 32768, 131072, 1048576]


@model_app.callback()
def _group() -> None:
    """Keeps `inspect` a command of its own name while it is the only one."""


@model_app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(help="Model directory, or just its config.json.", show_default=False)
    ],
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Context length to cost; repeatable.")
    ] = None,
    as_json: Json = False,
) -> int:
    """Dimensions, parameters, cache bytes and work per token, from config.json alone.

    Where weights are there too, their names, shapes and types are checked; no weight is read.
    """
    import json
    from dataclasses import asdict

    from deepinfer_engine.model.v41.config import load_config
    from deepinfer_engine.model.v41.costs import cache_cost, context_cost, count_parameters

    directory = path.parent if path.name == "config.json" else path
    config = load_config(directory)
    longest = config.text_config.max_position_embeddings
    lengths = context or [n for n in _CONTEXTS if n <= longest] or [longest]
    parameters, cache = count_parameters(config), cache_cost(config)
    costs = [context_cost(config, tokens) for tokens in lengths]
    shards = _check_weights(directory, config)
    if as_json:
        report = {
            "config": config.model_dump(),
            "parameters": asdict(parameters),
            "cache": asdict(cache),
            "contexts": [asdict(cost) for cost in costs],
            "weight_files_checked": shards,
        }
        print(json.dumps(report, indent=2))
        return 0

    from rich.console import Console

    rows = [
        ("one routed expert", _count(parameters.expert)),
        ("attention of one layer", _count(parameters.attention)),
        ("backbone", _count(parameters.backbone)),
        ("n-gram tables", _count(parameters.engram_tables)),
        ("draft module", _count(parameters.draft)),
        ("active per decoded token", _count(parameters.active_decode)),
        ("active per prompt token, bounded replay", _count(parameters.active_prefill_compact)),
        ("vision", _count(parameters.vision)),
        ("stored", _bytes(parameters.stored_bytes)),
    ]
    cached = [
        ("block of 128 tokens", f"{cache.block:,} B"),
        ("per token", f"{cache.per_token:,.0f} B"),
        ("state of one running sequence", f"{cache.state:,} B"),
    ]
    console = Console(highlight=False)
    console.print(_pairs("dimensions", _dimensions(config)))
    console.print(_pairs("parameters", rows))
    console.print(_pairs("cache, reference records", cached))
    table = _table("GFLOPs and traffic per token at a context length")
    table.add_column("tokens", justify="right")
    for head in ("decode", "prefill", "prefill, replay bounded", "cache read", "cache resident"):
        table.add_column(head, justify="right")
    for cost in costs:
        work = (cost.decode_flops, cost.prefill_flops, cost.prefill_compact_flops)
        table.add_row(
            f"{cost.tokens:,}",
            *(f"{flops / 1e9:,.4g}" for flops in work),
            _bytes(cost.decode_read_bytes),
            _bytes(cost.resident_bytes),
        )
    console.print(table)
    console.print("Operations are FP8 equivalents. Prefill counts no row of logits.")
    checked = f"{shards} file(s), every tensor present with the right shape and type"
    console.print(f"weights: {checked if shards else 'none in this directory'}")
    return 0


def _check_weights(directory: Path, config: ModelConfig) -> int:
    """Number of weight files, all checked; 0 where there are none."""
    from deepinfer_engine.model.v41.weights import check_weights

    if not any(directory.glob("model*.safetensors*")):
        return 0
    return check_weights(directory, config)


def _dimensions(config: ModelConfig) -> list[tuple[str, str]]:
    c = config.text_config
    draft = f" + {c.num_nextn_predict_layers} draft" if c.num_nextn_predict_layers else ""
    rows = [
        ("layers", f"{c.num_hidden_layers}{draft}, producers {c.n_producers}"),
        ("hidden, streams", f"{c.hidden_size}, {c.hc_mult}"),
        ("heads x channels", f"{c.num_attention_heads} x {c.head_dim}, window {c.sliding_window}"),
        ("experts", f"{c.n_routed_experts} + {c.n_shared_experts}, top {c.num_experts_per_tok}"),
        ("index", f"{c.index_n_heads} x {c.index_head_dim}, top {c.index_topk}"),
        ("vocabulary", f"{c.vocab_size:,}"),
        ("longest context", f"{c.max_position_embeddings:,}"),
        ("weights", "FP8, FP4 experts" if config.quantization_config else "bfloat16"),
    ]
    if config.vision_config is not None:
        v = config.vision_config
        rows.append(("vision", f"{v.num_hidden_layers} layers x {v.hidden_size}"))
    return rows


def _count(parameters: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{parameters / size:,.2f} {unit}"
    return str(parameters)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.4g} {unit}"
    return f"{count} B"


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _pairs(title: str, rows: list[tuple[str, str]]) -> Table:
    table = _table(title)
    table.show_header = False
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table
