"""What one rank does in the tests of several ranks; a module of its own, because processes are spawned."""

from __future__ import annotations

import datetime
import os
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from kvarena.hooks import hookimpl
from kvarena.pool.errors import DriverError

ENTRY = {"full": 64, "swa": 96}
PAGE, RESERVED = 4, 1 << 20


def serve(rank: int, count: int, init: str, inbox: Any, outbox: Any) -> None:
    """Run the scenarios that arrive, until None does."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=count)
    while (scenario := inbox.get()) is not None:
        try:
            scene = come if "comes" in scenario else run
            outbox.put((rank, scene(rank, dist.group.WORLD, scenario, inbox)))
        except Exception:  # noqa: BLE001 - the test prints it
            outbox.put((rank, {"broken": traceback.format_exc()}))
        if "die" in scenario.get("fail", ()):
            break  # as a scheduler does that cannot start; who waits for it hears of that, too
    dist.destroy_process_group()


def come(rank: int, group: Any, scenario: dict[str, Any], inbox: Any) -> dict[str, Any]:
    """The roll call of the ranks that come; the others are those of a node without kvarena."""
    import torch.distributed as dist
    from kvarena.errors import KvArenaError
    from kvarena.plugin.engines.sglang import ranks
    from kvarena.plugin.ranks import ProcessGroupRanks

    dist.barrier(group)  # as SGLang's own reduction: those that come are close together
    if not scenario["comes"][rank]:
        inbox.get()
        return {"error": "", "fix": ""}
    ranks.ROLL_CALL_TIMEOUT = datetime.timedelta(seconds=scenario["seconds"])
    try:
        ranks.roll_call(ProcessGroupRanks(group))
    except KvArenaError as error:
        return {"error": str(error), "fix": error.fix}
    return {"error": "", "fix": ""}


def run(rank: int, group: Any, scenario: dict[str, Any], inbox: Any) -> dict[str, Any]:
    """One resize of one rank; `scenario` says what goes wrong, and where."""
    import torch.distributed as dist
    from kvarena.errors import KvArenaError
    from kvarena.plugin.composition import make_manager
    from kvarena.plugin.engines.sglang.bound import SglangPool
    from kvarena.plugin.engines.sglang.families.v0_5_22 import FAMILY
    from kvarena.plugin.engines.sglang.session import ResizeSession
    from kvarena.plugin.ranks import ProcessGroupRanks
    from kvarena.pool import Arena, HostVmm, OutOfMemoryError
    from kvarena.pool.sizing import RanksDisagreeError

    mine = {key: value[rank] for key, value in scenario.items()}
    if "hang" in mine:
        dist.barrier(group)
        group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    driver = _Limited(HostVmm(memory_limit=RESERVED), mine.get("limit", 1 << 40), OutOfMemoryError)
    pool = make_pool()
    arena = Arena(driver, RESERVED)  # type: ignore[arg-type]
    arena.back(PAGE * 96)
    settings = _settings(mine.get("retries", 4))
    manager = make_manager(settings)
    bound = SglangPool(pool, arena, manager, sink_bytes=PAGE * 96)
    seen: dict[str, Any] = {"error": "", "kind": ""}
    layers = mine.get("layers", 1)
    plugin = _Hook(mine.get("fail") == "hook")
    manager.register(plugin)
    ranks = ProcessGroupRanks(group)
    exchanges: list[Any] = []
    exchange = ranks.exchange
    ranks.exchange = lambda report: [exchanges.append(report), exchange(report)][1]  # type: ignore[method-assign]
    try:
        with ResizeSession(bound, FAMILY, manager=manager, settings=settings, ranks=ranks) as session:
            if mine.get("fail") == "early":
                raise RuntimeError("no luck before anything began")
            config = session.solve(
                lambda budget: solve(budget // layers, mine),
                lambda tokens: from_tokens(tokens, layers),
                mine["budget"],
            )
            if mine.get("fail") == "die":
                os._exit(9)
            if mine.get("hang"):
                inbox.get()
            driver.broken = mine.get("fail", "")
            session.back(config)
            if mine.get("fail") == "late":
                raise RuntimeError("no luck after backing")
            session.finish()
        seen["attempts"] = session.steps.attempts
    except RanksDisagreeError as error:
        seen |= {"error": str(error), "kind": "ranks", "failed": sorted(error.failures)}
    except KvArenaError as error:
        seen |= {"error": str(error), "kind": type(error).__name__}
    except RuntimeError as error:
        seen |= {"error": str(error), "kind": "own"}
    driver.broken = ""
    seen |= {
        "exchanges": len(exchanges),
        "total": bound.total_bytes,
        "finalized": bound.finalized,
        "handles": len(arena.mappings),
        "backed": arena.backed_bytes,
        "tokens": getattr(locals().get("config"), "max_total_num_tokens", None),
    }
    arena.close()
    return seen


def solve(budget: int, mine: dict[str, Any]) -> Any:
    """The most tokens for a budget, with 3 window tokens to 4 full ones; fails when told to."""
    if mine.get("fail") == "solver":
        raise RuntimeError("Not enough memory. Please try to increase --mem-fraction-static.")
    return from_tokens(budget * 4 // (4 * ENTRY["full"] + 3 * ENTRY["swa"]) // PAGE * PAGE, 1)


def from_tokens(tokens: int, layers: int) -> Any:
    window = tokens * 3 // 4
    return SimpleNamespace(
        max_total_num_tokens=tokens,
        full_max_total_num_tokens=tokens,
        swa_max_total_num_tokens=window,
        unified_memory_pool_bytes=layers * (tokens * ENTRY["full"] + window * ENTRY["swa"]),
    )


def make_pool() -> Any:
    """What SglangPool asks of SGLang's pool."""
    specs = [
        SimpleNamespace(name=name, entry_bytes=lambda nbytes=nbytes: nbytes) for name, nbytes in ENTRY.items()
    ]
    by_name: dict[str, Any] = {spec.name: spec for spec in specs}
    return SimpleNamespace(
        total_bytes=RESERVED,
        _max_slots={name: RESERVED // nbytes for name, nbytes in ENTRY.items()},
        _page_size=PAGE,
        sub_pool_specs=specs,
        spec=by_name.__getitem__,
        min_slot_index=lambda name: -(-PAGE * 96 // ENTRY[name]),
    )


def _settings(retries: int) -> Any:
    from kvarena.plugin.config import Settings

    return Settings(enable=True, load_plugins=False, status=False, finalize_retries=retries)


class _Hook:
    """A third party, or a registration, that fails when the pool has its size."""

    def __init__(self, fails: bool) -> None:
        self._fails = fails

    @hookimpl
    def kvarena_pool_finalized(self) -> None:
        if self._fails:
            raise ZeroDivisionError("no luck while registering")


class _Limited:
    """The host's driver, with less memory than it says.

    `broken`: ``"back"`` fails whatever is created, ``"revert"`` all but the first, so the sink that is to
    come back.
    """

    def __init__(self, driver: Any, limit: int, error: Callable[..., Exception]) -> None:
        self._driver, self._limit, self._error = driver, limit, error
        self.broken = ""
        self._created = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)

    def create(self, nbytes: int) -> int:
        self._created += bool(self.broken)
        if self.broken == "back" or (self.broken == "revert" and self._created > 1):
            raise DriverError("create", "EIO", "no luck with the driver")
        if nbytes > self._limit:
            raise self._error("create", "ENOMEM", requested=nbytes, free=self._limit)
        handle: int = self._driver.create(nbytes)
        return handle
