"""Everything that others can attach to, one sentence each.

A plugin is a module or an object with some of these functions, marked with
``kvarena.hooks.hookimpl`` and named in the entry-point group ``kvarena``::

    # pyproject.toml
    [project.entry-points.kvarena]
    my_plugin = "my_package.my_module"
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvarena.hooks._markers import hookspec

if TYPE_CHECKING:
    import torch
    from kvarena.hooks.requests import BudgetRequest, TransferConfig
    from kvarena.pool import Driver, PostCaptureKVResize, Refusal, ResizablePool, SizingRequest
    from kvarena.transfer import Region, TransferEngine


@hookspec
def kvarena_refusals(request: SizingRequest) -> Iterable[Refusal] | None:
    """Why should this configuration not be sized after capture? Every answer is collected."""


@hookspec(firstresult=True)
def kvarena_driver(device: torch.device) -> Driver | None:
    """Which driver backs this device? The first answer counts."""


@hookspec(firstresult=True)
def kvarena_budget(request: BudgetRequest) -> int | None:
    """How many bytes may the pool have, now that graphs are captured? The first answer counts."""


@hookspec
def kvarena_pool_reserved(pool: ResizablePool) -> None:
    """The pool stands, only its sink is backed; called again when a finalize was taken back."""


@hookspec
def kvarena_pool_resizing(pool: ResizablePool, keep_bytes: int) -> None:
    """The memory behind the pool from `keep_bytes` on is about to be replaced or taken: let go of it."""


@hookspec
def kvarena_pool_finalized(pool: ResizablePool, resize: PostCaptureKVResize) -> None:
    """The pool has its final size; called again after each grow or give-back."""


@hookspec
def kvarena_pool_closing(pool: ResizablePool) -> None:
    """The pool is about to lose its memory: let go of it."""


@hookspec
def kvarena_transfer_engines(config: TransferConfig) -> Iterable[TransferEngine] | None:
    """Which transfer engines should know this pool? Every answer is collected."""


@hookspec
def kvarena_region_registered(engine: TransferEngine, region: Region) -> None:
    """An engine has registered a region."""


@hookspec
def kvarena_region_unregistered(engine: TransferEngine, region: Region) -> None:
    """An engine has let go of a region."""
