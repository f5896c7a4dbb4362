from __future__ import annotations

from hypothesis import HealthCheck, settings
from kvarena.pool.testing.allocator_machine import AllocatorMachine


class HostMachine(AllocatorMachine):
    expression = "kvarena.pool.HostVmm()"


TestHostMachine = HostMachine.TestCase
TestHostMachine.settings = settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
