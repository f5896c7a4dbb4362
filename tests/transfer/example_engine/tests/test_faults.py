"""The engine fails on purpose, and the ledger keeps what was there."""

from __future__ import annotations

import pytest
from kvarena.transfer import RegistrationError, RegistrationLedger
from kvarena.transfer.testing import FailingEngine
from kvarena_example_engine import SocketEngine


def test_a_growth_that_fails_keeps_the_old_registration(kvarena_memory) -> None:
    memory = kvarena_memory(1 << 20, 1 << 16)
    engine = FailingEngine(SocketEngine(), fail_at=2, ops=("register",))
    ledger = RegistrationLedger(engine)
    ledger.move_to([memory.backed], backed=memory.backed)
    before = ledger.regions
    memory.grow(1 << 20)
    with pytest.raises(RegistrationError):
        ledger.move_to([memory.backed], backed=memory.backed)
    assert ledger.regions == before
    engine.close()
