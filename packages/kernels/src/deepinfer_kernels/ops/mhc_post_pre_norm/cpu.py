"""`mhc_post_pre_norm` composed of the wide torch forms."""

from __future__ import annotations

from functools import partial

from deepinfer_kernels.ops.mhc_post.cpu import mhc_post
from deepinfer_kernels.ops.mhc_post_pre_norm.reference import composed
from deepinfer_kernels.ops.mhc_pre_norm.cpu import mhc_pre_norm

mhc_post_pre_norm = partial(composed, mhc_post, mhc_pre_norm)
