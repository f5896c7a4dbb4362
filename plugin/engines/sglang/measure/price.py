"""What a limit of running requests costs, said in one line."""

from __future__ import annotations

from typing import Any, NamedTuple, final

from kvarena.pool.reserve import Reserve, Sizing

__all__ = ["Price"]

_GIB = 1 << 30


@final
class Price(NamedTuple):
    """What was decided, beside what another limit would give."""

    sizing: Sizing
    limit: int
    """Running requests that SGLang allowed."""
    graph_requests: int
    """The largest batch that decode graphs cover."""
    at_graphs: Reserve
    """What would have to stay free at that limit."""
    bytes_per_token: float
    source: str = "measured"

    @property
    def extra_bytes(self) -> int:
        """What running more requests than the graphs cover costs."""
        return max(0, self.sizing.reserve.total_bytes - self.at_graphs.total_bytes)

    @property
    def extra_tokens(self) -> int:
        """How many more tokens the graphs' limit would give."""
        return int(self.extra_bytes / self.bytes_per_token) if self.bytes_per_token > 0 else 0

    def line(self) -> str:
        """For the log and for ``kvarena status``."""
        sizing = self.sizing
        said = [f"reserve {self.source}: {sizing.reserve.explain()}"]
        if sizing.yields == "requests":
            said.append(
                f"max_running_requests {self.limit} -> {sizing.max_requests}, the largest whose steps fit "
                "beside the pool of unmodified SGLang"
            )
        elif sizing.yields == "tokens":
            said.append(
                f"--max-running-requests {self.limit} needs more than unmodified SGLang leaves free, so the "
                f"pool gets {sizing.pool_bytes / _GIB:.2f} GiB"
            )
        elif sizing.yields == "reserve":
            said.append(
                f"that does not fit beside the {sizing.pool_bytes / _GIB:.2f} GiB of unmodified SGLang, "
                f"which are kept; {sizing.max_requests} requests may run (lower --chunked-prefill-size or "
                "--max-running-requests)"
            )
        if self.extra_tokens and sizing.max_requests > self.graph_requests > 0:
            said.append(
                f"{sizing.max_requests} running requests cost {self.extra_bytes / _GIB:.1f} GiB beyond the "
                f"graphs; --max-running-requests {self.graph_requests} gives {_thousands(self.extra_tokens)} "
                "more tokens"
            )
        return "; ".join(said)

    def as_json(self) -> dict[str, Any]:
        """For the timeline and the status file."""
        return {
            "reserve": self.sizing.reserve.as_json(),
            "pool_bytes": self.sizing.pool_bytes,
            "max_running_requests": self.sizing.max_requests,
            "limit": self.limit,
            "yields": self.sizing.yields,
            "extra_bytes": self.extra_bytes,
            "extra_tokens": self.extra_tokens,
            "source": self.source,
        }


def _thousands(count: int) -> str:
    return f"{count // 1000 * 1000 if count >= 10_000 else count:,}".replace(",", " ")
