"""What a layer always calls together, in one operator each."""

from __future__ import annotations

from torch import Tensor

from deepinfer_kernels.checks import floating, require, shape
from deepinfer_kernels.formats.records import record_format
from deepinfer_kernels.ops._dispatch import kernel


def mhc_pre_norm(
    S: Tensor,
    pending: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_pre`, and what its sub-layer reads: ``rms_norm(mhc_collapse(S, pending), norm)``.

    S: [n, h, H]; pending: [n, h], the mix of the sub-layer before; norm: [H]; the others as for
    `mhc_pre`, whose rms_eps is eps. Returns (x [n, H] like S, pre, post, comb).
    """
    op = "mhc_pre_norm"
    floating(op, S=S, pending=pending, fn=fn, base=base, scale=scale, norm=norm)
    shape(op, "S", S, (None, None, None))
    n, h, H = S.shape
    shape(op, "pending", pending, (n, h))
    shape(op, "fn", fn, (h * (h + 2), h * H))
    shape(op, "base", base, (h * (h + 2),))
    shape(op, "scale", scale, (3,))
    shape(op, "norm", norm, (H,))
    require(iters >= 1, op, f"iters is at least 1, got {iters}")
    return kernel(op, S.device)(S, pending, fn, base, scale, norm, eps, hc_eps, iters)


def norm_rope_quant(
    x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor, record: str
) -> Tensor:
    """``fake_quant(rope(rms_norm(x, weight, eps), cos, sin), record)``: a cache row.

    x: [n, D]; weight: [D]; cos, sin: [n, R/2]. Returns [n, D] like x.
    """
    op = "norm_rope_quant"
    floating(op, x=x, weight=weight, cos=cos, sin=sin)
    shape(op, "x", x, (None, None))
    n, dim = x.shape
    shape(op, "weight", weight, (dim,))
    _angles(op, cos, sin, n, dim)
    record_format(record).check_dim(dim)
    return kernel(op, x.device)(x, weight, eps, cos, sin, record)


def mla_query_key(
    x: Tensor,
    wq_a: Tensor,
    q_norm: Tensor,
    wq_b: Tensor,
    wkv: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    record: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The low-rank query and the latent key of each row.

    x: [n, H]; wq_a: [r, H]; q_norm: [r]; wq_b: [heads * D, r]; wkv: [D, H]; kv_norm: [D];
    cos, sin: [n, R/2]. Returns, like x: latent [n, r] = rms_norm(wq_a x), q [n, heads, D] =
    rope(wq_b latent), key [n, D] = norm_rope_quant(wkv x).
    """
    op = "mla_query_key"
    floating(op, x=x, wq_a=wq_a, q_norm=q_norm, wq_b=wq_b, wkv=wkv, kv_norm=kv_norm)
    shape(op, "x", x, (None, None))
    n, width = x.shape
    shape(op, "wq_a", wq_a, (None, width))
    rank = wq_a.shape[0]
    shape(op, "q_norm", q_norm, (rank,))
    shape(op, "wkv", wkv, (None, width))
    dim = wkv.shape[0]
    shape(op, "kv_norm", kv_norm, (dim,))
    shape(op, "wq_b", wq_b, (None, rank))
    require(
        dim > 0 and wq_b.shape[0] % dim == 0,
        op,
        f"wq_b has a multiple of {dim} rows, got {wq_b.shape[0]}",
    )
    _angles(op, cos, sin, n, dim)
    record_format(record).check_dim(dim)
    return kernel(op, x.device)(x, wq_a, q_norm, wq_b, wkv, kv_norm, cos, sin, eps, record)


def mla_output(out: Tensor, cos: Tensor, sin: Tensor, wo_a: Tensor, wo_b: Tensor) -> Tensor:
    """Inverse rotation, then the grouped low-rank output projection.

    out: [n, heads, D]; cos, sin: [n, R/2]; wo_a: [groups, r, heads / groups * D];
    wo_b: [H, groups * r]. Returns [n, H] like out.
    """
    op = "mla_output"
    floating(op, out=out, cos=cos, sin=sin, wo_a=wo_a, wo_b=wo_b)
    shape(op, "out", out, (None, None, None))
    n, heads, dim = out.shape
    shape(op, "wo_a", wo_a, (None, None, None))
    groups, rank, _ = wo_a.shape
    require(
        groups > 0 and heads % groups == 0,
        op,
        f"the groups of wo_a divide the {heads} heads, got {groups}",
    )
    shape(op, "wo_a", wo_a, (groups, rank, heads // groups * dim))
    shape(op, "wo_b", wo_b, (None, groups * rank))
    _angles(op, cos, sin, n, dim)
    return kernel(op, out.device)(out, cos, sin, wo_a, wo_b)


def moe_layer(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    topk: int,
    scaling: float,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    shared_w1: Tensor,
    shared_w3: Tensor,
    shared_w2: Tensor,
    limit: float,
) -> Tensor:
    """`moe_gate`, `moe_experts` and the shared expert, whose output is added with weight 1.

    x: [n, H]; gate: [E, H]; bias: [E], or [n, E] where rows differ; w1, w3: [E, I, H];
    w2: [E, H, I]; shared_w1, shared_w3: [J, H]; shared_w2: [H, J]. Returns [n, H] like x.
    """
    op = "moe_layer"
    floating(op, x=x, gate=gate, bias=bias, w1=w1, w3=w3, w2=w2)
    floating(op, shared_w1=shared_w1, shared_w3=shared_w3, shared_w2=shared_w2)
    shape(op, "x", x, (None, None))
    n, H = x.shape
    shape(op, "w1", w1, (None, None, H))
    experts, inner, _ = w1.shape
    shape(op, "w3", w3, w1.shape)
    shape(op, "w2", w2, (experts, H, inner))
    shape(op, "gate", gate, (experts, H))
    shape(op, "bias", bias, (experts,) if bias.dim() == 1 else (n, experts))
    shape(op, "shared_w1", shared_w1, (None, H))
    shape(op, "shared_w3", shared_w3, shared_w1.shape)
    shape(op, "shared_w2", shared_w2, (H, shared_w1.shape[0]))
    require(1 <= topk <= experts, op, f"topk is 1..{experts}, got {topk}")
    return kernel(op, x.device)(
        x, gate, bias, topk, scaling, w1, w3, w2, shared_w1, shared_w3, shared_w2, limit
    )


def _angles(op: str, cos: Tensor, sin: Tensor, n: int, dim: int) -> None:
    floating(op, cos=cos, sin=sin)
    shape(op, "cos", cos, (n, None))
    shape(op, "sin", sin, cos.shape)
    require(2 * cos.shape[1] <= dim, op, f"cos has at most {dim // 2} columns, got {cos.shape[1]}")
