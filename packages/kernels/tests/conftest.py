from __future__ import annotations

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile(
    "kernels", settings.get_profile("patient"), derandomize=True, max_examples=40
)
settings.load_profile("kernels")
