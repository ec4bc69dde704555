"""The object-storage tier keeps what every tier promises."""

from __future__ import annotations

import pytest

from deepinfer_kvtier.base.config import DEFAULT_CLASSES
from deepinfer_kvtier.base.timing import SystemClock
from deepinfer_kvtier.remote.tiers.objects import S3TierConfig, open_objects
from deepinfer_kvtier.remote.tiers.s3 import S3Tier
from deepinfer_kvtier.testing import TierContract

pytest.importorskip("obstore", reason="object-storage tests need the extra s3")


class TestS3(TierContract):
    def make(self):
        config = S3TierConfig(url="memory:///p")
        return S3Tier(config, open_objects(config), classes=DEFAULT_CLASSES, clock=SystemClock())
