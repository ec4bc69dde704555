"""Train the demo model: `python train.py`. Stop it at will; the same command goes on.

Two stages. The trunk learns the corpus: first on short rows with every compressed entry visible,
then on long ones with the index choosing and the caches rounded as they are when serving. The
draft module then learns to foretell the frozen trunk, and its confidences are calibrated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import data
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from calibrate import calibrate
from configuration import build, demo_config, initialise
from export import export
from fast_ops import speed_up
from optim import optimisers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokens import train_tokenizer
from torch import Tensor
from tqdm import tqdm
from twin import Pass, Twin

DEMO = Path(__file__).parents[2] / "src" / "deepinfer_engine" / "demo"
CONTEXT_WEIGHT = 0.15  # of a token that inference is given, against 1 of one it writes
ROUTER_STEP = 1e-3


@dataclass(frozen=True)
class Phase:
    """A stretch of the trunk's training; `until` is a share of its tokens."""

    until: float
    length: int
    mix: str
    select: bool
    quant: str


PHASES = (
    Phase(0.10, 256, "short", False, "none"),
    Phase(0.45, 512, "short", False, "none"),
    Phase(0.60, 512, "short", False, "reference"),
    Phase(0.90, 1024, "long", True, "reference"),
    Phase(1.00, 2048, "long", True, "reference"),
)
INDEX_FROM = 0.30  # the index starts to learn
ROUTER_UNTIL = 0.95  # the router's biases stop moving: a measurable skew stays
DRAFT_PHASES = (
    Phase(0.70, 512, "short", True, "reference"),
    Phase(1.00, 1024, "long", True, "reference"),
)
ANCHORS = 4  # one draft block for so many tokens of a row


@dataclass
class Progress:
    seed: int
    trunk_tokens: int
    draft_tokens: int
    stage: str = "trunk"
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.tokens / (self.trunk_tokens if self.stage == "trunk" else self.draft_tokens)


# ------------------------------------------------------------------ losses
def trunk_loss(
    twin: Twin, b: data.Batch, phase: Phase, probe: bool, step: int
) -> tuple[Tensor, Pass, dict[str, float]]:
    """Weighted cross entropy; with `probe` also the divergence of index and attention."""
    state = Pass(phase.quant, select=phase.select)
    T = phase.length
    if probe:
        draw = torch.Generator().manual_seed(step)
        state.probe_rows = torch.randperm(T, generator=draw)[: max(16, T // 16)].sort().values
    logits = twin.head(twin.trunk(b.inputs, state))
    each = F.cross_entropy(logits.flatten(0, 1), b.targets.flatten(), reduction="none")
    kinds = b.target_kinds.flatten()
    answer, context = kinds == data.ANSWER, kinds == data.CONTEXT
    weight = answer + CONTEXT_WEIGHT * context
    loss = (each * weight).sum() / weight.sum()
    seen = each.detach()
    report = {"answer": float(seen[answer].mean()), "context": float(seen[context].mean())}
    if probe:
        index = torch.stack([index_loss(p) for p in state.probes.values()]).mean()
        report["index"] = float(index.detach())
        loss = loss + index
    return loss, state, report


def index_loss(probe: Any) -> Tensor:
    """KL from the attention's share of each visible entry to the softmax of the scores."""
    some = probe.mass.sum(-1) > 1e-6
    target = probe.mass[some] / probe.mass[some].sum(-1, keepdim=True)
    guess = probe.scores.masked_fill(~probe.allowed, -torch.inf)[some].log_softmax(-1)
    guess = guess.masked_fill(~probe.allowed[some], 0.0)
    return (target * ((target + 1e-9).log() - guess)).sum(-1).mean()


def draft_loss(twin: Twin, b: data.Batch, step: int) -> tuple[Tensor, Pass, dict[str, float]]:
    """0.1 cross entropy + 0.9 L1 distance + 1.0 confidence, weights exp(-k / block)."""
    size = twin.cfg.dspark_block_size
    with torch.no_grad():
        seen = Pass("reference")
        hidden = twin.trunk(b.inputs, seen)
        features = torch.cat(seen.features, -1)
    # the anchor P+1 and the first draft P+2 are tokens the model writes
    ok = (b.kinds[:, 1:-1] == data.ANSWER) & (b.kinds[:, 2:] == data.ANSWER)
    chance = ok.float() + 1e-6
    draw = torch.Generator().manual_seed(step)
    at = chance.multinomial(ok.shape[1] // ANCHORS, generator=draw).sort(-1).values
    usable = ok.gather(1, at)
    at = at.clamp_max(b.inputs.shape[1] - 1)
    state = Pass("reference")
    base, z = twin.draft_block(features, b.ids, at, "reference", state)
    k = torch.arange(size)
    T = b.inputs.shape[1]
    label_at = at.unsqueeze(-1) + 2 + k
    inside = label_at <= T
    label_at = label_at.clamp_max(T)
    previous = b.ids.gather(1, (label_at - 1).flatten(1)).view_as(label_at)
    label = b.ids.gather(1, label_at.flatten(1)).view_as(label_at)
    written = b.kinds.gather(1, label_at.flatten(1)).view_as(label_at) == data.ANSWER
    valid = (inside & written & usable.unsqueeze(-1)).cummin(-1).values
    bias, e = twin.markov(previous)
    q = (base + bias).log_softmax(-1)
    with torch.no_grad():
        row = torch.arange(len(at)).view(-1, 1, 1)
        p = twin.head(hidden[row, label_at - 1]).softmax(-1)
    weight = torch.exp(-k / size) * valid
    total = weight.sum().clamp_min(1e-6)
    ce = -q.gather(-1, label.unsqueeze(-1)).squeeze(-1)
    l1 = (q.exp() - p).abs().sum(-1)
    keep = (1 - 0.5 * l1.detach()).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(
        twin.confidence(z.detach(), e.detach()), keep, reduction="none"
    )
    loss = ((0.1 * ce + 0.9 * l1 + bce) * weight).sum() / total
    full = valid.all(-1)
    tau = keep[full].cumprod(-1).sum(-1).mean()
    return (
        loss,
        state,
        {
            "ce": float((ce.detach() * weight).sum() / total),
            "l1": float((l1.detach() * weight).sum() / total),
            "accepted": float(tau),
        },
    )


# ------------------------------------------------------------------ the loop
class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, options.work
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.work.mkdir(parents=True, exist_ok=True)
        self.progress = Progress(options.seed, options.trunk_tokens, options.draft_tokens)
        self.tokenizer = self.get_tokenizer()
        self.config = demo_config(self.tokenizer)
        self.twin = build(self.tokenizer, self.config)
        speed_up(self.twin)
        initialise(self.twin, options.seed)
        stored = self.work / "progress.json"
        if stored.exists():
            self.progress = Progress(**json.loads(stored.read_text()))
            self.progress.trunk_tokens, self.progress.draft_tokens = (
                options.trunk_tokens,
                options.draft_tokens,
            )
            self.load_weights()
        self.start_stage()
        if stored.exists():
            self.load_optimisers()

    def get_tokenizer(self) -> Tokenizer:
        path = self.work / "tokenizer.json"
        if not path.exists():
            train_tokenizer(data.pieces(self.options.seed, 4000)).save(str(path))
        return Tokenizer.from_file(str(path))

    def start_stage(self) -> None:
        draft = self.progress.stage == "draft"
        for name, p in self.twin.named_parameters():
            p.requires_grad_(name.startswith("mtp.") == draft)
        named = [(n, p) for n, p in self.twin.named_parameters() if p.requires_grad]
        self.named = named
        self.optimisers = optimisers(named, self.options.muon_lr, self.options.adam_lr)

    # -------------------------------------------------------------- storage
    def state_tensors(self) -> dict[str, Tensor]:
        names = {id(p): n for n, p in self.named}
        out = {f"weights.{n}": t for n, t in self.twin.state_dict().items()}
        for optimiser in self.optimisers:
            for p, state in optimiser.state.items():
                out |= {f"optimiser.{names[id(p)]}:{k}": v for k, v in state.items()}
        return {k: v.detach().contiguous() for k, v in out.items()}

    def save(self) -> None:
        if self.rank:
            return
        draft = self.work / "state.safetensors.part"
        save_file(self.state_tensors(), draft)
        draft.rename(self.work / "state.safetensors")
        text = json.dumps(asdict(self.progress))
        (self.work / "progress.json.part").write_text(text)
        (self.work / "progress.json.part").rename(self.work / "progress.json")

    def load_weights(self) -> None:
        stored = load_file(self.work / "state.safetensors")
        weights = {
            k.removeprefix("weights."): v for k, v in stored.items() if k.startswith("weights.")
        }
        self.twin.load_state_dict(weights)

    def load_optimisers(self) -> None:
        stored = load_file(self.work / "state.safetensors")
        params = dict(self.named)
        owner = {id(p): o for o in self.optimisers for g in o.param_groups for p in g["params"]}
        for key, value in stored.items():
            if key.startswith("optimiser."):
                name, kind = key.removeprefix("optimiser.").split(":")
                if name in params:
                    p = params[name]
                    owner[id(p)].state[p][kind] = value

    # -------------------------------------------------------------- steps
    def rows(self, length: int) -> tuple[int, int]:
        """Rows of this process and of all: shares follow `--split`."""
        split = self.options.split[: self.world]
        unit = sum(split)
        total = max(1, round(self.options.batch_tokens / length / unit)) * unit
        return total * split[self.rank] // unit, total

    def reduce(self, loads: dict[str, Tensor], share: float) -> None:
        """Average gradients by rows, and sum expert loads, over the processes."""
        if self.world == 1:
            return
        grads = [p.grad for _, p in self.named if p.grad is not None]
        flat = torch.cat([g.flatten() * share for g in grads] + [v.float() for v in loads.values()])
        dist.all_reduce(flat)
        at = 0
        for g in grads:
            g.copy_(flat[at : at + g.numel()].view_as(g))
            at += g.numel()
        for k, v in loads.items():
            loads[k] = flat[at : at + v.numel()]
            at += v.numel()

    @torch.no_grad()
    def balance(self, loads: dict[str, Tensor]) -> None:
        for name, load in loads.items():
            bias = self.twin.get_submodule(name).ffn.gate.bias
            bias += ROUTER_STEP * torch.sign(load.float().mean() - load.float())
            self.twin.get_submodule(name).ffn.gate.bias_vl.copy_(bias)

    def learning_rate(self) -> float:
        """Share of the peak: 50 steps up, then straight down to 5 %."""
        if self.progress.stage == "trunk":
            warm = min(1.0, (self.progress.step + 1) / 50)
        else:
            warm = min(1.0, self.progress.share * 50 + 0.02)
        return warm * (1 - 0.95 * min(1.0, self.progress.share))

    def step(
        self,
        loss_of: Callable[[], tuple[Tensor, Pass, dict[str, float]]],
        share: float,
        balance: bool,
    ) -> dict[str, float]:
        rate = self.learning_rate()
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * rate
            optimiser.zero_grad()
        loss, state, report = loss_of()
        loss.backward()
        self.reduce(state.loads, share)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self.named], 1.0)
        if not math.isfinite(float(norm)):
            raise FloatingPointError(f"gradient norm {float(norm)} at step {self.progress.step}")
        for optimiser in self.optimisers:
            optimiser.step()
        if balance:
            self.balance(state.loads)
        return report | {"lr": rate}

    def run_stage(self) -> None:
        progress, options = self.progress, self.options
        total = progress.trunk_tokens if progress.stage == "trunk" else progress.draft_tokens
        bar = tqdm(
            total=total,
            initial=progress.tokens,
            unit="tok",
            unit_scale=True,
            mininterval=20,
            disable=self.rank > 0,
        )
        saved = time.monotonic()
        recent: dict[str, float] = {}
        while progress.tokens < total:
            began = time.monotonic()
            trunk = progress.stage == "trunk"
            phases = PHASES if trunk else DRAFT_PHASES
            phase = next(p for p in phases if progress.share < p.until)
            length = phase.length
            rows, total_rows = self.rows(length)
            key = f"{progress.seed}-{progress.stage}-{progress.step}-{self.rank}"
            b = data.batch(self.tokenizer, key, rows, length, phase.mix)
            if trunk:
                report = self.step(
                    lambda b=b, phase=phase: trunk_loss(
                        self.twin, b, phase, progress.share > INDEX_FROM, progress.step
                    ),
                    rows / total_rows,
                    progress.share < ROUTER_UNTIL,
                )
            else:
                report = self.step(
                    lambda b=b: draft_loss(self.twin, b, progress.step),
                    rows / total_rows,
                    progress.share < ROUTER_UNTIL,
                )
            progress.step += 1
            progress.tokens += total_rows * length
            progress.seconds += time.monotonic() - began
            for k, v in report.items():
                recent[k] = v if k not in recent else 0.9 * recent[k] + 0.1 * v
            bar.update(total_rows * length)
            bar.set_postfix_str(" ".join(f"{k} {v:.3f}" for k, v in recent.items()), refresh=False)
            if progress.step % 25 == 0:
                point = {
                    "stage": progress.stage,
                    "step": progress.step,
                    "tokens": progress.tokens,
                    "seconds": round(progress.seconds),
                }
                progress.curve.append(point | {k: round(v, 4) for k, v in recent.items()})
            if time.monotonic() - saved > options.save_every:
                self.save()
                saved = time.monotonic()
        bar.close()

    def run(self) -> None:
        if self.progress.stage == "trunk":
            self.run_stage()
            self.progress.stage, self.progress.tokens = "draft", 0
            self.start_stage()
            self.save()
        self.run_stage()
        if self.rank == 0:
            self.progress.temperatures = calibrate(self.twin, self.tokenizer)
            self.save()
            finish(self.twin, self.tokenizer, self.config, self.progress, self.options.out)


def finish(
    twin: Twin, tokenizer: Tokenizer, config: dict[str, Any], progress: Progress, out: Path
) -> None:
    """Export and write `training.json`; figures already measured there are kept."""
    size = export(twin, tokenizer, config, out)
    path = out / "training.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    record |= {
        "seed": progress.seed,
        "stage": progress.stage,
        "tokens": {"trunk": progress.trunk_tokens, "draft": progress.draft_tokens},
        "seconds": round(progress.seconds),
        "confidence_temperatures": progress.temperatures,
        "weights_bytes": size,
        "curve": progress.curve,
    }
    path.write_text(json.dumps(record) + "\n")
    print(f"wrote {out}: {size / 1e6:.2f} MB of weights after {progress.seconds / 60:.0f} minutes")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--work",
        type=Path,
        default=Path(".train_demo"),
        help="state of the run; resumed if present",
    )
    p.add_argument("--out", type=Path, default=DEMO, help="where the checkpoint goes")
    p.add_argument("--seed", type=int, default=41)
    p.add_argument("--trunk-tokens", type=int, default=6_000_000)
    p.add_argument("--draft-tokens", type=int, default=1_500_000)
    p.add_argument("--batch-tokens", type=int, default=4096)
    p.add_argument(
        "--split",
        type=lambda s: [int(x) for x in s.split(",")],
        default=[1, 1],
        help="rows per process, such as 3,1",
    )
    p.add_argument("--muon-lr", type=float, default=0.02)
    p.add_argument("--adam-lr", type=float, default=4e-3)
    p.add_argument("--save-every", type=float, default=300.0, help="seconds")
    p.add_argument("--export-only", action="store_true", help="export the stored state and stop")
    return p.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    trainer = Trainer(options)
    if options.export_only:
        finish(trainer.twin, trainer.tokenizer, trainer.config, trainer.progress, options.out)
        return
    trainer.run()


if __name__ == "__main__":
    main()
