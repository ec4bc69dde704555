"""`mhc_post_pre_norm` composed of the Triton forms of its parts."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops.mhc_post.triton import mhc_post
from deepinfer_kernels.ops.mhc_post_pre_norm.reference import composed
from deepinfer_kernels.ops.mhc_pre_norm.triton import mhc_pre_norm

mhc_post_pre_norm = partial(composed, mhc_post, mhc_pre_norm)
