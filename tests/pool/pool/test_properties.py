"""Design invariants 1, 2 and 4, over any shape, size and history of a pool."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kvarena.pool import ArenaStateError, DriverError, HostVmm, MHASubPoolSpec, MLASubPoolSpec, UnifiedKVPool
from kvarena.pool.testing import FailingDriver
from kvarena.pool.testing.pool_contract import exposed_capacities

PAGE = 4096


class PoolLife(RuleBasedStateMachine):
    """A pool between its constructor and its close, with failures on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = FailingDriver(HostVmm(memory_limit=256 * PAGE))
        self.pool: UnifiedKVPool | None = None

    @precondition(lambda self: self.pool is None)
    @rule(
        layers=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        dims=st.tuples(st.integers(1, 33), st.integers(1, 33)),
        page_size=st.integers(1, 7),
        floats=st.booleans(),
        extra=st.integers(0, 100 * PAGE),
        terms=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    )
    def reserve(
        self,
        layers: tuple[int, int],
        dims: tuple[int, int],
        page_size: int,
        floats: bool,
        extra: int,
        terms: tuple[int, int],
    ) -> None:
        self.specs = [
            MHASubPoolSpec("full", "up", layers[0], 1, dims[0], torch.bfloat16),
            MHASubPoolSpec("swa", "down", layers[1], 2, dims[1], torch.uint8),
        ]
        if floats:
            self.specs.insert(0, MLASubPoolSpec("mla", "float", 2, dims[1], 1, torch.float32))  # type: ignore[arg-type]
        self.page_size = page_size
        self.terms = [("full", terms[0]), ("swa", terms[1])]
        probe = self._make(1 << 30, active=True)
        self.floor = probe.floor_bytes
        probe.close()
        self.pool = self._make(self.floor + extra, active=True)
        self.addresses = self._addresses()
        self.mark = 0

    def _make(self, total_bytes: int, *, active: bool) -> UnifiedKVPool:
        return UnifiedKVPool(
            total_bytes=total_bytes,
            sub_pool_specs=self.specs,
            driver=self.driver,
            page_size=self.page_size,
            post_capture_active=active,
            bs1_floor_terms=self.terms,
        )

    def _addresses(self) -> list[tuple[int, int]]:
        pool = self.pool
        assert pool is not None
        views = [
            pool.k_view(spec.name, layer) for spec in pool.sub_pool_specs for layer in range(spec.layer_num)
        ]
        return [(id(tensor), tensor.data_ptr()) for tensor in (pool.raw, *views)]

    def _size(self, share: float) -> int:
        assert self.pool is not None
        return self.floor + int(share * (self.pool.reserved_bytes - self.floor))

    @precondition(lambda self: self.pool is not None and not self.pool.finalized)
    @rule(share=st.floats(0, 1), fail_at=st.none() | st.integers(1, 5))
    def finalize(self, share: float, fail_at: int | None) -> None:
        assert self.pool is not None
        size = self._size(share)
        self._step(
            lambda pool: pool.finalize_backing(SimpleNamespace(unified_memory_pool_bytes=size)), fail_at
        )
        if self.pool.finalized:
            assert self.pool.total_bytes == size
            assert int(self.pool.raw[:size].max()) == 0

    @precondition(lambda self: self.pool is not None and self.pool.finalized)
    @rule(share=st.floats(0, 1), fail_at=st.none() | st.integers(1, 3))
    def grow(self, share: float, fail_at: int | None) -> None:
        assert self.pool is not None
        size = self._size(share)
        if size > self.pool.total_bytes:
            self._step(lambda pool: pool.grow(size), fail_at)

    @precondition(lambda self: self.pool is not None and self.pool.finalized)
    @rule(
        share=st.floats(0, 1),
        whole=st.booleans(),
        taken_back=st.booleans(),
        fail_at=st.none() | st.integers(1, 3),
    )
    def shrink(self, share: float, whole: bool, taken_back: bool, fail_at: int | None) -> None:
        assert self.pool is not None
        ends = [mapping.end for mapping in self.pool.arena.mappings[:-1]]
        legal = [end for end in ends if end >= self.floor]
        size = legal[int(share * (len(legal) - 1))] if whole and legal else self._size(share)
        if size >= self.pool.total_bytes:
            return
        before = exposed_capacities(self.pool)
        self._step(lambda pool: pool.shrink(size), fail_at)
        if taken_back and self.pool.total_bytes == size:
            self._step(lambda pool: pool.revert_shrink(), fail_at)
            if self.pool.total_bytes != size:
                assert exposed_capacities(self.pool) == before

    @precondition(lambda self: self.pool is not None and self.pool.finalized)
    @rule()
    def revert(self) -> None:
        self._step(lambda pool: pool.revert_finalize(), None)

    @precondition(lambda self: self.pool is not None)
    @rule()
    def close(self) -> None:
        assert self.pool is not None
        self.pool.close()
        self.pool = None
        assert self.driver.outstanding() == []
        assert self.driver.free_bytes() == 256 * PAGE

    def _step(self, step: object, fail_at: int | None) -> None:
        pool = self.pool
        assert pool is not None
        assert callable(step)
        self.mark = self.mark % 250 + 1
        pool.raw[: pool.active_allocation_bytes] = self.mark
        before, active = exposed_capacities(pool), pool.active_allocation_bytes
        self.driver.fail_at = fail_at
        try:
            step(pool)
        except (DriverError, ArenaStateError):
            assert exposed_capacities(pool) == before
            assert int(pool.raw[:active].min()) == self.mark
        self.driver.fail_at = None

    @invariant()
    def addresses_never_move(self) -> None:
        if self.pool is not None:
            assert self._addresses() == self.addresses

    @invariant()
    def reported_is_within_backed(self) -> None:
        if self.pool is not None:
            backed = self.pool.arena.backed_bytes
            assert all(0 < length <= backed for length in self.pool.get_contiguous_buf_infos().lens)
            assert backed - self.pool.active_allocation_bytes < PAGE
            assert backed == sum(mapping.nbytes for mapping in self.pool.arena.mappings)

    @invariant()
    def it_equals_an_eager_pool(self) -> None:
        pool = self.pool
        if pool is None or not pool.finalized or pool.arena.backed_bytes > self.driver.free_bytes():
            return
        eager = self._make(pool.total_bytes, active=False)
        ours, theirs = exposed_capacities(pool), exposed_capacities(eager)
        eager.close()
        handles = ours.pop("handles")
        assert [(handles[0][0], sum(nbytes for _, nbytes in handles))] == theirs.pop("handles")
        assert ours == theirs

    def teardown(self) -> None:
        if self.pool is not None:
            self.close()


TestPoolLife = PoolLife.TestCase
TestPoolLife.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
