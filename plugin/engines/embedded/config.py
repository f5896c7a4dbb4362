"""What an embedded engine is made of: sizes of the model, of the steps and of the pool.

No torch here: the demo's parent process reads these too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.config import DEVICE

if TYPE_CHECKING:
    from kvarena.plugin.config import Settings
    from kvarena.pool import SizingRequest
    from kvarena.pool.budget import PoolCost

__all__ = ["BOS", "EOS", "FULL", "PAD", "VOCABULARY", "WINDOW", "EngineConfig", "ModelConfig", "SettingError"]

BOS: Final = 256
EOS: Final = 257
PAD: Final = 258
VOCABULARY: Final = 259

FULL: Final = "full"
"""The sub-pool of the layers that see everything."""
WINDOW: Final = "swa"
"""The sub-pool of the layers that see a sliding window."""

_MAX_CHUNK: Final = 2048

KVDtype = Literal["float32", "bfloat16", "float16"]


class SettingError(KvArenaError):
    """A value that cannot work; nothing was started."""


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the decoder. Even layers see everything, odd ones a window.

    The window layers have more KV heads than the full ones, as hybrid models of 2025 have, so
    the two sub-pools' pages differ in bytes.
    """

    layer_num: int = 4
    hidden_size: int = 128
    intermediate_size: int = 256
    head_num: int = 4
    head_dim: int = 32
    full_kv_head_num: int = 2
    window_kv_head_num: int = 4
    window: int = 64
    """Tokens that a window layer sees, the current one among them."""
    kv_dtype: KVDtype = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layer_num", "hidden_size", "intermediate_size", "head_num", "head_dim", "window"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} is {getattr(self, name)}, it must be at least 1.")
        if self.layer_num < 2:
            raise SettingError("layer_num is 1; a hybrid model needs a full and a window layer.")
        if self.head_dim % 2:
            raise SettingError(f"head_dim is {self.head_dim}; rotary embedding needs an even one.")
        for name in ("full_kv_head_num", "window_kv_head_num"):
            heads = getattr(self, name)
            if heads < 1 or self.head_num % heads:
                raise SettingError(f"{name} is {heads}; it must divide head_num {self.head_num}.")
        if not 0 <= self.seed < 2**63:
            raise SettingError(f"the seed is {self.seed}; it must be from 0 to 2**63 - 1.")

    def is_window(self, layer: int) -> bool:
        """Whether a layer sees only the window."""
        return layer % 2 == 1

    def kv_heads(self, layer: int) -> int:
        """KV heads of a layer."""
        return self.window_kv_head_num if self.is_window(layer) else self.full_kv_head_num

    @property
    def full_layer_num(self) -> int:
        """Layers that see everything."""
        return (self.layer_num + 1) // 2

    @property
    def window_layer_num(self) -> int:
        """Layers that see a window."""
        return self.layer_num // 2

    @property
    def _value_bytes(self) -> int:
        return 4 if self.kv_dtype == "float32" else 2

    @property
    def full_token_bytes(self) -> int:
        """Bytes of one token's K and V in all full layers."""
        return 2 * self.full_layer_num * self.full_kv_head_num * self.head_dim * self._value_bytes

    @property
    def window_token_bytes(self) -> int:
        """Bytes of one token's K and V in all window layers."""
        return 2 * self.window_layer_num * self.window_kv_head_num * self.head_dim * self._value_bytes


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one process of the embedded engine runs."""

    model: ModelConfig = ModelConfig()
    device: str = "cpu"
    """``cpu``, ``cuda`` or ``cuda:<index>``."""
    page_size: int = 16
    chunk_pages: int = 8
    """Pages that one prefill step fills."""
    context_length: int = 2048
    """The most tokens of one sequence, prompt and answer; sets the width of the captured steps."""
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Rows of the captured decode steps; the largest is the most requests that run at once."""
    transfer_pages: int = 64
    """Pages that one submission to the transfer engine moves."""
    reserved_bytes: int | None = None
    """Addresses to set aside; None: enough for `max_running` sequences of `context_length`."""

    def __post_init__(self) -> None:
        if not DEVICE.fullmatch(self.device):
            raise SettingError(f"the device is {self.device!r}.", fix="Give cpu, cuda or cuda:<index>.")
        for name, minimum in (
            ("page_size", 1),
            ("chunk_pages", 1),
            ("context_length", 2),
            ("transfer_pages", 1),
        ):
            if getattr(self, name) < minimum:
                raise SettingError(f"{name} is {getattr(self, name)}, it must be at least {minimum}.")
        if self.chunk > _MAX_CHUNK:
            raise SettingError(
                f"a prefill step of {self.chunk_pages} pages of {self.page_size} has {self.chunk} tokens, "
                f"the most are {_MAX_CHUNK}.",
                fix="Lower chunk_pages or page_size.",
            )
        sizes = self.batch_sizes
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise SettingError(f"batch_sizes are {sizes}; they must be positive and rise.")
        if self.reserved_bytes is not None and self.reserved_bytes < 1:
            raise SettingError(f"reserved_bytes is {self.reserved_bytes}, it must be at least 1.")

    @property
    def on_gpu(self) -> bool:
        """Whether the pool is on a GPU, whose memory the driver measures; else a limit is set for it."""
        return self.device != "cpu"

    @property
    def chunk(self) -> int:
        """Tokens of one prefill step."""
        return self.chunk_pages * self.page_size

    @property
    def width(self) -> int:
        """Pages of the longest sequence."""
        return self.pages_of(self.context_length)

    @property
    def widths(self) -> tuple[int, ...]:
        """Pages that the steps are made for: a short sequence need not read a long one's table."""
        return tuple(sorted({-(-self.width // 4), -(-self.width // 2), self.width}))

    @property
    def max_running(self) -> int:
        """Requests that decode at once."""
        return self.batch_sizes[-1]

    @property
    def window_pages(self) -> int:
        """The most window pages that a sequence holds between two decode steps."""
        return math.ceil((self.model.window - 1) / self.page_size) + 1

    def pages_of(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def first_window_page(self, position: int) -> int:
        """The first page that a token at `position` can see in a window layer."""
        return max(0, position - self.model.window + 1) // self.page_size

    def page_bytes(self) -> tuple[int, int]:
        """Bytes of a full and of a window page."""
        return self.model.full_token_bytes * self.page_size, self.model.window_token_bytes * self.page_size

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of so many tokens needs at its widest, its prefill included."""
        full, window = self.page_bytes()
        pages = self.pages_of(tokens)
        return pages * full + min(pages, self.window_pages + self.chunk_pages) * window

    def planned_bytes(self) -> int:
        """Bytes to reserve when `reserved_bytes` does not say."""
        if self.reserved_bytes is not None:
            return self.reserved_bytes
        # One more page of each kind for slot 0, which no sequence gets.
        return self.max_running * self.sequence_bytes(self.context_length) + sum(self.page_bytes())

    def min_bytes(self, *, granularity: int, headroom: int) -> int:
        """The least memory in which one request of one chunk can be served.

        Parameters
        ----------
        granularity : int
            Bytes, of the driver.
        headroom : int
            Bytes to leave free beside the pool.
        """
        cost = self._cost()
        # While the sink's handle is swapped for the pool's, both exist.
        parts = (cost.total_bytes(self.chunk), cost.sink_bytes, headroom)
        return sum(-(-part // granularity) * granularity for part in parts)

    def shortage(
        self, settings: Settings, *, granularity: int, free_bytes: int = 0
    ) -> tuple[str, str] | None:
        """What is too small for one request, and what to set; None: it fits.

        Parameters
        ----------
        settings : Settings
            The operator's.
        granularity : int
            Bytes, of the driver.
        free_bytes : int
            What the device has now; 0 where it is known to be too little.
        """
        # A limit between two granules is rounded down, for whole ones are backed.
        minimum = -(-self._cost().total_bytes(self.chunk) // granularity) * granularity
        if settings.pool_bytes is not None and settings.pool_bytes < minimum:
            return (
                f"a limit of {settings.pool_bytes} bytes on the pool",
                f"The least that works is {minimum} bytes: raise KVARENA_POOL_BYTES"
                + (" (the demo's --memory-limit)." if self.on_gpu else "."),
            )
        minimum = self.min_bytes(granularity=granularity, headroom=settings.headroom)
        limit = None if self.on_gpu else settings.memory_limit
        if min(free_bytes, free_bytes if limit is None else limit) >= minimum:
            return None
        if limit is None:
            given, remedy = "the memory that is free", "free memory on the device"
        else:
            given = f"a memory limit of {limit} bytes"
            remedy = "raise KVARENA_MEMORY_LIMIT (the demo's --memory-limit)"
        if settings.headroom:
            given += f", less a headroom of {settings.headroom} bytes,"
            remedy += ", or lower KVARENA_HEADROOM"
        return given, f"The least that works is {minimum} bytes: {remedy}."

    def sizing_request(self, *, driver: str | None, transfer_backend: str | None) -> SizingRequest:
        """What the planners are asked about this engine.

        Parameters
        ----------
        driver : str or None
            Of the device's memory.
        transfer_backend : str or None
            The transfer engine.
        """
        from kvarena.pool.refusals import SizingRequest

        return SizingRequest(
            enabled=True,
            device=self.device.partition(":")[0],
            driver=driver,
            chunked_prefill_size=self.chunk,
            prefill_captured_sizes=(self.chunk,),
            transfer_backend=transfer_backend,
        )

    def evolve(self, **changes: Any) -> EngineConfig:
        """A copy with some fields changed, checked like a new one."""
        return msgspec.structs.replace(self, **changes)

    def _cost(self) -> PoolCost:
        from kvarena.pool.budget import PoolCost, SubPoolCost

        full, window = self.page_bytes()
        chain = (SubPoolCost(FULL, full, self.page_size), SubPoolCost(WINDOW, window, self.page_size))
        return PoolCost(chain, self.page_size)
