"""Property tests without a clock: other work may share the machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("no_clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no_clock")
