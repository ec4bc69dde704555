"""Faster equals of `twin.Ops` for float32 training on a CPU.

The hyper-connection kernels are C++ behind ctypes, compiled on first use (without a compiler the
literal ones stay). The attention works in blocks of queries against the keys they can reach at
all, with one saved matrix of probabilities per block.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import twin
from torch import Tensor

SOURCE = Path(__file__).with_name("fast_ops.cpp")
# The parts of -ffast-math that help here, each by name: linked with -ffast-math itself, a library
# turns subnormal numbers off for the whole process that loads it.
FLAGS = (
    "-O3", "-march=native", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math",
    "-fno-signed-zeros", "-fassociative-math", "-freciprocal-math", "-ffinite-math-only",
)  # fmt: skip
_library: ctypes.CDLL | None = None


def build() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there is no C++ compiler."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
    if compiler is None:
        warnings.warn("no C++ compiler: training runs on the slow literal operations", stacklevel=2)
        return None
    digest = hashlib.sha256(SOURCE.read_bytes() + repr(FLAGS).encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"deepinfer-train-demo-{os.getuid()}" / f"{digest}.so"
    if not target.exists():
        target.parent.mkdir(mode=0o700, exist_ok=True)
        draft = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(draft)], check=True)
        draft.rename(target)
    return ctypes.CDLL(str(target))


def call(name: str, *arguments: Any) -> None:
    """Tensors go as pointers, floats as float, the token count first among integers as long."""
    assert _library is not None
    passed: list[Any] = []
    for a in arguments:
        if isinstance(a, Tensor):
            assert a.is_contiguous()
            assert a.dtype == torch.float32
            passed.append(ctypes.c_void_p(a.data_ptr()))
        elif isinstance(a, float):
            passed.append(ctypes.c_float(a))
        else:
            passed.append(a)
    getattr(_library, name)(*passed)


def count(n: int) -> ctypes.c_long:
    return ctypes.c_long(n)


class _Weights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, m: Tensor, base: Tensor, scale: Tensor, iters: int, eps: float) -> Any:
        m = m.contiguous()
        n, lead = m.numel() // 24, m.shape[:-1]
        pre, post, comb = m.new_empty(*lead, 4), m.new_empty(*lead, 4), m.new_empty(*lead, 4, 4)
        call("hc_weights_forward", m, base, scale, count(n), iters, eps, pre, post, comb)
        ctx.save_for_backward(m, base, scale)
        ctx.iters, ctx.eps = iters, eps
        return pre, post, comb

    @staticmethod
    def backward(ctx: Any, gpre: Tensor, gpost: Tensor, gcomb: Tensor) -> Any:
        m, base, scale = ctx.saved_tensors
        gm, gbase, gscale = torch.empty_like(m), torch.zeros_like(base), torch.zeros_like(scale)
        call(
            "hc_weights_backward", m, base, scale, count(m.numel() // 24), ctx.iters, ctx.eps,
            gpre.contiguous(), gpost.contiguous(), gcomb.contiguous(), gm, gbase, gscale,
        )  # fmt: skip
        return gm, gbase, gscale, None, None


class _Expand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, S: Tensor, post: Tensor, A: Tensor) -> Tensor:
        y, S = y.contiguous(), S.contiguous()
        out = torch.empty_like(S)
        c = S.shape[-1]
        call("hc_expand_forward", y, S, post, A, count(y.numel() // c), c, out)
        ctx.save_for_backward(y, S, post, A)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        y, S, post, A = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in (y, S, post, A)]
        c = S.shape[-1]
        n = count(y.numel() // c)
        call("hc_expand_backward", y, S, post, A, n, c, g.contiguous(), *grads)
        return tuple(grads)


class _CollapseNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, S: Tensor, p: Tensor, w: Tensor, eps: float) -> Tensor:
        S, p = S.contiguous(), p.contiguous()
        c = S.shape[-1]
        out, inv = S.new_empty(*S.shape[:-2], c), S.new_empty(S.shape[:-2])
        call("hc_collapse_norm_forward", S, p, w, count(inv.numel()), c, eps, out, inv)
        ctx.save_for_backward(S, p, w, inv)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        S, p, w, inv = ctx.saved_tensors
        gS, gp, gw = torch.empty_like(S), torch.empty_like(p), torch.zeros_like(w)
        call(
            "hc_collapse_norm_backward", S, p, w, inv, count(inv.numel()), S.shape[-1],
            g.contiguous(), gS, gp, gw,
        )  # fmt: skip
        return gS, gp, gw, None


def hc_mix(
    S: Tensor, fn: Tensor, base: Tensor, scale: Tensor, cfg: twin.TwinConfig
) -> tuple[Tensor, Tensor, Tensor]:
    f = S.flatten(-2)
    mean = torch.linalg.vector_norm(f, dim=-1, keepdim=True).square() / f.shape[-1]
    m = F.linear(f, fn) * torch.rsqrt(mean + cfg.rms_norm_eps)
    return _Weights.apply(m, base, scale, cfg.hc_sinkhorn_iters, cfg.hc_eps)


class _Attention(torch.autograd.Function):
    """One block of queries: q `[B, n, heads, D]`, keys `[B, K, D]`, bias `[B or 1, n, 1, K]`
    (0 or -inf), sink `[heads]`, all bfloat16: products of that type are 2.5 times as fast."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, bias: Tensor, sink: Tensor) -> Tensor:
        B, n, heads, D = q.shape
        scale = D**-0.5
        P = q.new_empty(B, n, heads, keys.shape[1] + 1)
        P[..., :-1] = bias
        P[..., -1] = sink
        flat = P.view(B, n * heads, -1)
        rows = q.reshape(B, n * heads, D)
        padded = F.pad(keys, (0, 0, 0, 1))
        torch.baddbmm(flat, rows, padded.transpose(1, 2), alpha=scale, out=flat)
        torch.softmax(flat, -1, out=flat)
        ctx.save_for_backward(rows, padded, flat)
        ctx.heads = heads
        return torch.bmm(flat, padded).view(B, n, heads, D)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        rows, padded, P = ctx.saved_tensors
        B, _, D = rows.shape
        g = g.reshape(rows.shape)
        gP = torch.bmm(g, padded.transpose(1, 2))
        gS = torch._softmax_backward_data(gP, P, -1, P.dtype)
        gsink = gS[..., -1].view(-1, ctx.heads).sum(0)
        gq = torch.bmm(gS, padded).mul_(D**-0.5)
        gk = torch.bmm(P.transpose(1, 2), g).baddbmm_(gS.transpose(1, 2), rows, alpha=D**-0.5)
        return gq.view(B, -1, ctx.heads, D), gk[:, :-1], None, gsink


def attend(
    q: Tensor, local: Tensor, entries: Tensor | None, chosen: Tensor | None, sink: Tensor, W: int
) -> Tensor:
    T = q.shape[1]
    block = 64 if T <= 512 else 128
    given, (q, local, sink) = q.dtype, (x.bfloat16() for x in (q, local, sink))
    entries = None if entries is None else entries.bfloat16()
    t = torch.arange(T)
    out: list[Tensor] = []
    for s in range(0, T, block):
        e = min(s + block, T)
        lo = max(0, s - W + 1)
        seen = (t[lo:e] <= t[s:e, None]) & (t[lo:e] > t[s:e, None] - W)
        keys, mask = local[:, lo:e], seen.unsqueeze(0)
        if entries is not None and chosen is not None:
            upto = e * entries.shape[1] // T
            keys = torch.cat((keys, entries[:, :upto]), 1)
            picked = chosen[:, s:e, :upto]
            # an expanded mask is the same for every row: keep it one row
            picked = picked[:1] if picked.stride(0) == 0 else picked
            mask = torch.cat((mask.expand(picked.shape[0], -1, -1), picked), -1)
        bias = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        out.append(_Attention.apply(q[:, s:e], keys, bias.unsqueeze(2), sink))
    return torch.cat(out, 1).to(given)


def index_scores(qi: Tensor, wi: Tensor, K: Tensor) -> Tensor:
    """Selection needs no gradient: bfloat16 blocks of queries against finished entries alone."""
    if torch.is_grad_enabled():
        return twin.index_scores(qi, wi, K)
    B, T, heads, D = qi.shape
    J = K.shape[1]
    q16, keys = qi.bfloat16(), K.bfloat16().transpose(1, 2)
    out = qi.new_zeros(B, T, J, dtype=torch.bfloat16)
    for s in range(0, T, 128):
        e = min(s + 128, T)
        upto = e * J // T
        rows = torch.bmm(q16[:, s:e].reshape(B, -1, D), keys[..., :upto]).relu_()
        rows = rows.view(B * (e - s), heads, upto)
        weights = wi[:, s:e].reshape(-1, 1, heads).bfloat16()
        out[:, s:e, :upto] = torch.bmm(weights, rows).view(B, e - s, upto)
    return out


def linear16(layer: torch.nn.Linear, x: Tensor) -> Tensor:
    """The same product in bfloat16, float32 outside."""
    return F.linear(x.bfloat16(), layer.weight.bfloat16()).to(x.dtype)


def routed_experts(
    x: Tensor, picks: Tensor, w: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, limit: float
) -> Tensor:
    weights = (t.bfloat16() for t in (w1, w3, w2))
    return twin.routed_experts(x.bfloat16(), picks, w.bfloat16(), *weights, limit).to(x.dtype)


def speed_up(model: twin.Twin) -> None:
    """Give a float32 twin faster operations; literal ones stay where no kernel could be built."""
    model.ops = fast_ops()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = functools.partial(linear16, module)


def fast_ops() -> twin.Ops:
    """Operations for the trainer; literal ones where no kernel could be built."""
    global _library
    _library = _library or build()
    topk = lambda scores, k: scores.topk(k, dim=-1).indices  # noqa: E731
    if _library is None:
        return twin.Ops(attend=attend, topk=topk)
    return twin.Ops(
        hc_mix=hc_mix,
        hc_collapse_norm=_CollapseNorm.apply,
        hc_expand=_Expand.apply,
        attend=attend,
        topk=topk,
        index_scores=index_scores,
        routed_experts=routed_experts,
    )
