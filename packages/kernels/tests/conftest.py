from __future__ import annotations

import torch
from hypothesis import settings

from deepinfer_kernels.native import measured

torch.set_num_threads(1)
settings.register_profile(
    "kernels", settings.get_profile("patient"), derandomize=True, max_examples=40
)
settings.load_profile("kernels")

# Without AVX2 the faster form is chosen by measuring, in every process anew: what is tested must
# not follow that, so nothing is measured. `test_native` tests the measuring.
measured.level = lambda: "avx2"
