"""Train the demo model: `python train.py`. Stop it at will; the same command goes on.

Three stages. The trunk learns the corpus: first on short rows with every compressed entry
visible, then on long ones with the index choosing and the caches rounded as they are when serving.
Then the draft module learns beside it, on the same forward passes, while the trunk goes on with
more of what needs exact copies. At last the trunk stands still, the draft module settles, and its
confidences are calibrated.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import data
import torch
import torch.distributed as dist
from calibrate import calibrate
from configuration import build, demo_config, initialise
from export import export
from fast_ops import speed_up
from losses import draft_loss, frozen_trunk, trunk_loss
from optim import optimisers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokens import train_tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from twin import Twin

DEMO = Path(__file__).parents[2] / "src" / "deepinfer_engine" / "demo"
ROUTER_STEP = 1e-3
STAGES = ("trunk", "joint", "draft")


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
SHORT, LONG = (
    Phase(1.0, 512, "drill", True, "reference"),
    Phase(1.0, 1024, "long", True, "reference"),
)
ALTERNATING = (SHORT, SHORT, LONG)  # of the joint and draft stages, step by step


@dataclass
class Progress:
    seed: int
    trunk_tokens: int
    joint_tokens: int
    draft_tokens: int
    stage: str = "trunk"
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.tokens / self.total

    @property
    def total(self) -> int:
        """Tokens of the current stage."""
        totals = (self.trunk_tokens, self.joint_tokens, self.draft_tokens)
        return totals[STAGES.index(self.stage)]

    @property
    def phase(self) -> Phase:
        if self.stage == "trunk":
            return next(p for p in PHASES if self.share < p.until)
        return ALTERNATING[self.step % len(ALTERNATING)]


# ------------------------------------------------------------------ the loop
class Trainer:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, options.work
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.work.mkdir(parents=True, exist_ok=True)
        totals = {f"{stage}_tokens": getattr(options, f"{stage}_tokens") for stage in STAGES}
        self.progress = Progress(options.seed, **totals)
        self.tokenizer = self.get_tokenizer()
        self.config = demo_config(self.tokenizer)
        self.twin = build(self.tokenizer, self.config)
        speed_up(self.twin)
        initialise(self.twin, options.seed)
        stored = self.work / "progress.json"
        if stored.exists():
            self.progress = Progress(**json.loads(stored.read_text()) | totals)
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
        """Which parameters learn, and with which optimisers."""
        learn = {"trunk": (False,), "joint": (False, True), "draft": (True,)}[self.progress.stage]
        self.named: list[tuple[str, nn.Parameter]] = []
        self.optimisers: list[tuple[bool, torch.optim.Optimizer]] = []
        for drafting in (False, True):
            part = [
                (n, p) for n, p in self.twin.named_parameters() if n.startswith("mtp.") == drafting
            ]
            for _, p in part:
                p.requires_grad_(drafting in learn)
            if drafting in learn:
                self.named += part
                made = optimisers(part, self.options.muon_lr, self.options.adam_lr)
                self.optimisers += [(drafting, optimiser) for optimiser in made]

    # -------------------------------------------------------------- storage
    def state_tensors(self) -> dict[str, Tensor]:
        names = {id(p): n for n, p in self.named}
        out = {f"weights.{n}": t for n, t in self.twin.state_dict().items()}
        for _, optimiser in self.optimisers:
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
        owner = {id(p): o for _, o in self.optimisers for g in o.param_groups for p in g["params"]}
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

    def learning_rate(self, drafting: bool) -> float:
        """Share of the peak: up for 50 steps of the stage, then straight down."""
        done = min(1.0, self.progress.share)
        warm = min(1.0, (self.progress.tokens / self.options.batch_tokens + 1) / 50)
        first, last = {
            "trunk": (1.0, 0.05),
            "joint": (1.0, 0.5) if drafting else (0.4, 0.04),
            "draft": (0.5, 0.02),
        }[self.progress.stage]
        return warm * (first + (last - first) * done)

    def loss(
        self, b: data.Batch, phase: Phase
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, float]]:
        """The loss of the stage, the expert loads of what learns, and a report."""
        progress, twin = self.progress, self.twin
        if progress.stage == "draft":
            hidden, features = frozen_trunk(twin, b)
            loss, state, report = draft_loss(twin, b, hidden, features, progress.step)
            return loss, state.loads, report
        probe = progress.stage == "joint" or progress.share > INDEX_FROM
        loss, hidden, state, report = trunk_loss(twin, b, phase, probe, progress.step)
        if progress.stage == "trunk":
            return loss, state.loads, report
        features = torch.cat(state.features, -1).detach()
        more, drafted, figures = draft_loss(twin, b, hidden.detach(), features, progress.step)
        return loss + more, state.loads | drafted.loads, report | figures

    def step(self, b: data.Batch, phase: Phase, share: float) -> dict[str, float]:
        rates = {drafting: self.learning_rate(drafting) for drafting, _ in self.optimisers}
        for drafting, optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * rates[drafting]
            optimiser.zero_grad()
        loss, loads, report = self.loss(b, phase)
        loss.backward()
        self.reduce(loads, share)
        norm = torch.nn.utils.clip_grad_norm_([p for _, p in self.named], 1.0)
        if not math.isfinite(float(norm)):
            raise FloatingPointError(f"gradient norm {float(norm)} at step {self.progress.step}")
        for _, optimiser in self.optimisers:
            optimiser.step()
        if self.progress.share < ROUTER_UNTIL:
            self.balance(loads)
        return report | {"lr": max(rates.values())}

    def run_stage(self) -> None:
        progress, options = self.progress, self.options
        total = progress.total
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
            phase = progress.phase
            rows, total_rows = self.rows(phase.length)
            key = f"{progress.seed}-{progress.stage}-{progress.step}-{self.rank}"
            b = data.batch(self.tokenizer, key, rows, phase.length, phase.mix)
            report = self.step(b, phase, rows / total_rows)
            progress.step += 1
            progress.tokens += total_rows * phase.length
            progress.seconds += time.monotonic() - began
            for k, v in report.items():
                recent[k] = v if k not in recent else 0.9 * recent[k] + 0.1 * v
            bar.update(total_rows * phase.length)
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
        for stage in STAGES[STAGES.index(self.progress.stage) :]:
            if stage != self.progress.stage:
                self.progress.stage, self.progress.tokens = stage, 0
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
        "tokens": {stage: getattr(progress, f"{stage}_tokens") for stage in STAGES},
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
        default=Path(".cache/train_demo"),
        help="state of the run; resumed if present",
    )
    p.add_argument("--out", type=Path, default=DEMO, help="where the checkpoint goes")
    p.add_argument("--seed", type=int, default=41)
    p.add_argument("--trunk-tokens", type=int, default=8_000_000)
    p.add_argument("--joint-tokens", type=int, default=1_300_000)
    p.add_argument("--draft-tokens", type=int, default=900_000)
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
