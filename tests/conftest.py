"""What all tests share: the profile of hypothesis, and the S3 server that starts when a test asks for it."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.s3_proxy import s3_proxy
from tests.s3_server import s3_root, s3_server

__all__ = ["s3_proxy", "s3_root", "s3_server"]

settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
