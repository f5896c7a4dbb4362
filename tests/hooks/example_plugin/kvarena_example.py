"""A third party: refuses odd page sizes, caps the budget, and remembers what it saw."""

from kvarena.hooks import hookimpl

seen = []


@hookimpl
def kvarena_refusals(request):
    from kvarena.pool import Refusal

    return [Refusal(code="example", setting="EXAMPLE_SETTING", reason="the example plugin says no")]


@hookimpl
def kvarena_budget(request):
    return 123 * (1 << 20)


@hookimpl
def kvarena_pool_finalized(pool, resize):
    seen.append(("finalized", resize.unified_memory_pool_bytes))
