"""The life of a pool as a pytest class: whatever fails, and whenever, what stood before stands after.

Derive from `LifeContract` for a pool of your own, and from `ElasticLifeContract` if it also grows and
shrinks; give the fixture ``life``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest
from kvarena.errors import KvArenaError

__all__ = ["ElasticLifeContract", "LifeContract", "SampleLife"]

_CALLS = 60
"""More than anybody gets in one step."""


class SampleLife(ABC):
    """A pool with an engine and a plugin, each of which can be told to fail."""

    @abstractmethod
    def start(self, step: str) -> None:
        """Bring the pool to where `step` (``"finalize"``, ``"grow"``, ``"shrink"``) can be taken."""

    @abstractmethod
    def take(self, step: str) -> None:
        """Take the step."""

    @abstractmethod
    def fail(self, who: str, number: int) -> None:
        """From now on, the `number`-th call of ``"driver"``, ``"engine"`` or ``"plugin"`` fails; 0: none."""

    @abstractmethod
    def state(self) -> object:
        """Everything that a size can show in; asserts that nothing without memory is registered."""

    @abstractmethod
    def hold(self, stuck: bool) -> None:
        """Whether the engine refuses to unregister."""

    @abstractmethod
    def registered_bytes(self) -> int:
        """What the engine itself holds of the pool."""

    @abstractmethod
    def backed_bytes(self) -> int:
        """What has memory."""

    @abstractmethod
    def close(self) -> None:
        """End the life."""


class LifeContract:
    """A pool that is sized once."""

    @pytest.mark.parametrize("who", ["driver", "engine", "plugin"])
    def test_a_finalize_that_fails_at_any_call_changes_nothing(self, life: SampleLife, who: str) -> None:
        _fails_everywhere(life, "finalize", who)

    def test_registrations_follow_the_size(self, life: SampleLife) -> None:
        life.start("finalize")
        sink = life.backed_bytes()
        assert life.registered_bytes() == sink
        life.take("finalize")
        assert life.registered_bytes() == life.backed_bytes() > sink

    def test_memory_that_an_engine_holds_stays_and_the_caller_hears_of_it(self, life: SampleLife) -> None:
        life.start("finalize")
        life.take("finalize")
        backed = life.backed_bytes()
        life.hold(True)
        with pytest.raises(KvArenaError):
            life.close()
        assert life.registered_bytes() == life.backed_bytes() == backed
        life.hold(False)
        life.close()
        assert (life.registered_bytes(), life.backed_bytes()) == (0, 0)

    @pytest.mark.parametrize("who", ["driver", "engine", "plugin"])
    def test_a_close_that_fails_at_any_call_is_finished_by_the_next(self, life: SampleLife, who: str) -> None:
        life.start("finalize")
        life.take("finalize")
        for number in range(1, _CALLS):
            life.fail(who, number)
            try:
                life.close()
            except KvArenaError:
                life.fail(who, 0)
                assert life.registered_bytes() <= life.backed_bytes()
            else:
                break
        life.fail(who, 0)
        assert 1 < number < _CALLS
        assert (life.registered_bytes(), life.backed_bytes()) == (0, 0)


class ElasticLifeContract(LifeContract):
    """A pool that grows and shrinks while it serves."""

    @pytest.mark.parametrize("who", ["driver", "engine", "plugin"])
    @pytest.mark.parametrize("step", ["grow", "shrink"])
    def test_a_change_that_fails_at_any_call_changes_nothing(
        self, life: SampleLife, step: str, who: str
    ) -> None:
        _fails_everywhere(life, step, who)


def _fails_everywhere(life: SampleLife, step: str, who: str) -> None:
    life.start(step)
    before = life.state()
    for number in range(1, _CALLS):
        life.fail(who, number)
        try:
            life.take(step)
        except KvArenaError:
            life.fail(who, 0)
            assert life.state() == before, f"call {number}"
        else:
            break
    life.fail(who, 0)
    assert 1 < number < _CALLS
    assert life.state() != before
