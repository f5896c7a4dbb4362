"""An engine from plan to close: the pool through the hooks, the model over it, the steps captured."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from kvarena.errors import KvArenaError
from kvarena.plugin.config import Settings
from kvarena.plugin.engines.embedded.attention import PagedKV
from kvarena.plugin.engines.embedded.config import FULL, WINDOW, EngineConfig, SettingError
from kvarena.plugin.engines.embedded.invariants import (
    addresses,
    capacities,
    moved,
    registered_beyond_backed,
)
from kvarena.plugin.engines.embedded.model import Decoder
from kvarena.plugin.engines.embedded.page_book import PageBook
from kvarena.plugin.engines.embedded.peers import describe_pages, make_manifest
from kvarena.plugin.engines.embedded.runner import StepRunner
from kvarena.plugin.lifecycle import PoolLifecycle
from kvarena.plugin.observe.status.model import PoolLabels
from kvarena.pool import (
    MHASubPoolSpec,
    UnifiedSWATokenToKVPoolAllocator,
    resize_for,
)
from kvarena.pool.errors import OutOfMemoryError, PoolSizeError
from kvarena.transfer import PageChannel

if TYPE_CHECKING:
    from kvarena.hooks import HookManager
    from kvarena.plugin.engines.embedded.scheduler import DecodeBatch
    from kvarena.pool import Refusal, SubPoolSpec, UnifiedKVPool
    from kvarena.transfer import RegistrationLedger

__all__ = ["Engine", "make_model", "sub_pool_specs"]


class Engine:
    """A model over a pool, ready to serve once constructed.

    Parameters
    ----------
    config : EngineConfig
    settings : Settings
        The operator's: memory limit, transfer engine, timeouts.
    eager_bytes : int, optional
        An eager pool of this size, without any transfer engine, instead of one that is sized after capture.
    captured : bool
        Whether to capture graphs where there is CUDA.
    model : Decoder, optional
        Weights that are there already.
    manager : HookManager, optional
        By default the built-in answers and the installed plugins.
    progress : callable, optional
        Takes a line for each stage.
    name : str
        What ``kvarena status`` calls this process.

    Raises
    ------
    SettingError
        The memory limit is below what one request needs; names the least that works.
    KvArenaError
        Nothing is left behind.
    """

    def __init__(
        self,
        config: EngineConfig,
        settings: Settings,
        *,
        eager_bytes: int | None = None,
        captured: bool = True,
        model: Decoder | None = None,
        manager: HookManager | None = None,
        progress: Callable[[str], None] = lambda what: None,
        name: str = "embedded",
    ) -> None:
        self.config = config
        self.settings = settings
        self.model = model or make_model(config)
        self._eager_bytes = eager_bytes
        self._captured = captured
        self._progress = progress
        self._notes: dict[str, Any] = {}
        self._problems: list[str] = []
        self.lifecycle = PoolLifecycle(settings, device=self.model.device, manager=manager, name=name)
        self.lifecycle.reporter.labels = PoolLabels(role=name)
        try:
            self._start()
        except BaseException:
            self.lifecycle.close()
            raise

    @property
    def ledger(self) -> RegistrationLedger:
        """Of the engine that moves the KV."""
        return self.lifecycle.ledgers[0]

    @cached_property
    def channel(self) -> PageChannel:
        """Moves pages to a peer."""
        return PageChannel(
            self.ledger, make_manifest(self.config, self.pool), lambda: describe_pages(self.pool)
        )

    def note_batch(self, batch: DecodeBatch) -> None:
        """Remember what the decode batch has done, for the report."""
        self.note(decode_steps=batch.steps, widest_batch=batch.widest)

    def note(self, **facts: Any) -> None:
        """Remember what a server has done, for the report."""
        self._notes |= facts

    def check(self) -> None:
        """Look at the invariants that hold at any time; what does not is in the report from now on."""
        self._problems += [
            *moved(self._addresses, addresses(self.pool, self.allocator, self.kv)),
            *registered_beyond_backed(self.pool, self.lifecycle.ledgers),
        ]

    def report(self) -> dict[str, Any]:
        """What this engine's pool is, and every invariant that does not hold; for an idle engine."""
        ledgers = self.lifecycle.ledgers
        pool = self.pool
        self.check()
        problems = list(dict.fromkeys([*self._problems, *self.book.leaks()]))
        return {
            "device": str(pool.device),
            "timeline": self.lifecycle.timeline.as_dicts(),
            "capacities": capacities(pool, self.allocator),
            "capacity_tokens": self.book.capacity_tokens(),
            "reserved_bytes": pool.arena.reserved_bytes,
            "backed_bytes": pool.arena.backed_bytes,
            "registered_bytes": max((ledger.registered_bytes for ledger in ledgers), default=0),
            "handles": len(pool.arena.mappings),
            "transfer": [ledger.engine.name for ledger in ledgers],
            "addresses_checked": len(self._addresses),
            "moved_pages": self.allocator.full_attn_allocator.moved_pages
            + self.allocator.swa_attn_allocator.moved_pages,
            "transfers": {
                ledger.engine.name: {"submitted": ledger.traffic.transfers, "failed": ledger.traffic.failures}
                for ledger in ledgers
            },
            "problems": problems,
            **self._notes,
        }

    def close(self) -> None:
        """Give everything back; a second call does nothing."""
        self.lifecycle.close()

    def _start(self) -> None:
        eager = self._eager_bytes is not None or bool(self._refusals())
        self._progress("reserving addresses" if not eager else "allocating an eager pool")
        self.pool = self._reserve(eager)
        self.allocator = UnifiedSWATokenToKVPoolAllocator(self.pool, FULL, WINDOW)
        self.lifecycle.reporter.watch(self.allocator)
        self.kv = PagedKV(self.config, self.pool, self.allocator)
        self.runner = StepRunner(self.config, self.model, self.kv, captured=self._captured)
        self._addresses = addresses(self.pool, self.allocator, self.kv)
        self._problems += registered_beyond_backed(self.pool, self.lifecycle.ledgers)
        self._capture()
        if not eager:
            self._finalize()
        self.book = PageBook(self.config, self.pool, self.allocator)
        self._progress(f"ready with {self.book.capacity_tokens()} tokens")

    def _refusals(self) -> tuple[Refusal, ...]:
        request = self.config.sizing_request(
            driver=self.lifecycle.driver.name, transfer_backend=next(iter(self.settings.transfer), None)
        )
        return self.lifecycle.plan(request)

    def _reserve(self, eager: bool) -> UnifiedKVPool:
        nbytes = self.config.planned_bytes()
        if eager:
            nbytes = self._eager_bytes or min(nbytes, self.lifecycle.driver.free_bytes())
        try:
            return self.lifecycle.reserve(
                sub_pool_specs(self.config),
                total_bytes=nbytes,
                page_size=self.config.page_size,
                # One request of one chunk.
                bs1_floor_terms=[(FULL, self.config.chunk), (WINDOW, self.config.chunk)],
                post_capture=not eager,
            )
        except OutOfMemoryError as error:
            raise self._too_small(error) from error
        except PoolSizeError as error:
            raise SettingError(
                f"a pool of {nbytes} bytes was asked for, one request needs {error.minimum}.",
                fix="Reserve more, or lower the context length or the page size.",
            ) from error

    def _capture(self) -> None:
        self._progress("capturing the steps")
        found = self.runner.warm_up()
        self.lifecycle.timeline.add(
            "captured",
            nbytes=self.pool.arena.backed_bytes,
            address=self.pool.arena.base,
            milliseconds=found.milliseconds,
            how=found.how,
            steps=found.steps,
        )

    def _finalize(self) -> None:
        self._progress("measuring memory and backing the pool")
        try:
            resize = resize_for(self.pool, self.lifecycle.budget())
            self.lifecycle.finalize(resize, self.allocator)
        except PoolSizeError as error:
            raise self._too_small(error) from error

    def _too_small(self, error: KvArenaError) -> SettingError:
        """One request does not fit: what is too small, and what to set."""
        short = self.config.shortage(self.settings, granularity=self.lifecycle.driver.granularity)
        assert short is not None  # no memory is enough for nothing
        given, fix = short
        return SettingError(f"{given} is below what one request needs: {error.what}", fix=fix)


def make_model(config: EngineConfig) -> Decoder:
    """Draw the weights, on the configured device, with the arithmetic that every process shares.

    Raises
    ------
    SettingError
        The device is not there.
    """
    device = torch.device(config.device)
    if config.on_gpu:
        count = torch.cuda.device_count()
        if count <= (device.index or 0):
            there = f"has {count} CUDA devices" if count else "has no CUDA device"
            raise SettingError(
                f"this machine {there}; {config.device} was asked for.",
                fix=f"Give --device cuda:{count - 1} or less." if count else "Give --device cpu.",
            )
        # Graphs are captured on the current device, whatever the tensors say.
        torch.cuda.set_device(device.index or 0)
    torch.set_num_threads(1)
    # TF32 would drown the distance between two logits in noise.
    torch.set_float32_matmul_precision("highest")
    return Decoder(config.model, device)


def sub_pool_specs(config: EngineConfig) -> list[SubPoolSpec]:
    """The model's KV: full layers grow up, window layers down."""
    model = config.model
    dtype = getattr(torch, model.kv_dtype)
    return [
        MHASubPoolSpec(FULL, "up", model.full_layer_num, model.full_kv_head_num, model.head_dim, dtype),
        MHASubPoolSpec(
            WINDOW, "down", model.window_layer_num, model.window_kv_head_num, model.head_dim, dtype
        ),
    ]
