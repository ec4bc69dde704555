"""Balance, movement and CPU time beside two published policies, on unseen steps.

    OMP_NUM_THREADS=1 python packages/eplb/benches/bench_plan.py [--seeds 1 2 3] [--json FILE]

One row a policy; `ratio` is the excess over perfect balance relative to the per-step policy's.
"""

from __future__ import annotations

import sys

from deepinfer_eplb.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
