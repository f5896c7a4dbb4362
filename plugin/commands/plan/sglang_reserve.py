"""The memory that SGLang sets aside before it sizes its KV cache, release by release.

SGLang turns a guess into ``mem_fraction_static`` when the operator sets none: the share of the card
that weights and KV cache may take. Read in 0.5.16 to 0.5.23 (``server_args.py`` up to 0.5.18,
``arg_groups/memory_hook.py`` from 0.5.19 on). All figures are MiB, as there.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvarena.plugin.commands.plan.errors import PlanError

__all__ = ["RELEASES", "Release", "Reserve", "ServerShape", "release", "reserve_after", "reserve_before"]


@dataclass(frozen=True, slots=True)
class Release:
    """What differs between releases."""

    name: str
    post_capture_floor: int
    small_card_doubled: bool
    decode_capped_by_requests: bool
    vlm_fixed_after_capture: bool
    pp_prefill_capped: bool


#: The post-capture floor rose with sgl-project/sglang#34996.
RELEASES = {
    release.name: release
    for release in (
        Release("0.5.16", 512, False, False, False, False),
        Release("0.5.17", 512, False, False, False, False),
        Release("0.5.18", 1536, False, False, False, False),
        Release("0.5.19", 1536, False, False, False, True),
        Release("0.5.20", 1536, True, False, True, True),
        Release("0.5.21", 1536, True, False, True, True),
        Release("0.5.22", 1536, True, True, True, True),
        Release("0.5.23", 1536, True, True, True, True),
    )
}

#: MiB above which the whole reserve is at least `_LARGE_CARD_RESERVE`.
_LARGE_CARD = 60 * 1024
_LARGE_CARD_RESERVE = 10 * 1024
_VLM_AFTER_CAPTURE = 8 * 1024
_PP_PREFILL_CAP = 8192


def release(name: str) -> Release:
    """A release by its number. Raises `PlanError` for one that was not read."""
    found = RELEASES.get(name)
    if found is None:
        raise PlanError(
            f"The reserve of SGLang {name!r} is not known.", fix=f"Known are {', '.join(RELEASES)}."
        )
    return found


@dataclass(frozen=True, slots=True)
class ServerShape:
    """The server's settings that the guess depends on, named after SGLang's options.

    ``None`` is the option left out: SGLang then chooses by the card.
    """

    gpu_mib: int
    tp: int = 1
    pp: int = 1
    mla: bool = False
    disaggregation_mode: str = "null"
    chunked_prefill_size: int | None = None
    cuda_graph_max_bs: int | None = None
    max_running_requests: int | None = None
    draft_tokens: int | None = None
    prefill_graph: bool = True
    decode_graph: bool = True
    vision_layers: int | None = None
    vision_hidden: int | None = None


@dataclass(frozen=True, slots=True)
class Reserve:
    """MiB set aside, term by term, and the fraction that SGLang makes of them."""

    terms: tuple[tuple[str, float], ...]
    mem_fraction_static: float

    @property
    def mib(self) -> float:
        return sum(size for _, size in self.terms)


def reserve_before(server: ServerShape, rel: Release) -> Reserve:
    """The guess for graphs and activations, when the cache is sized before capture."""
    terms = [
        ("constant", 512.0),
        ("activations", 1.5 * _activation_tokens(server, rel)),
        ("parallel", _parallel(server)),
        ("graphs", graph_reserve_mib(server, rel)),
    ]
    total = sum(size for _, size in terms)
    if server.gpu_mib > _LARGE_CARD and total < _LARGE_CARD_RESERVE:
        terms.append(("large card", _LARGE_CARD_RESERVE - total))
    return _with_fraction(server, terms, fixed_vlm=False)


def reserve_after(server: ServerShape, rel: Release) -> Reserve:
    """What is still kept back, when the cache is sized after capture."""
    terms = [("constant", float(rel.post_capture_floor)), ("parallel", _parallel(server))]
    return _with_fraction(server, terms, fixed_vlm=rel.vlm_fixed_after_capture)


def graph_reserve_mib(server: ServerShape, rel: Release) -> float:
    """The part of the guess that is for CUDA graphs."""
    total = 0.0
    if server.disaggregation_mode != "prefill" and server.decode_graph:
        total += 2.0 * _decode_max_bs(server, rel)
    if server.disaggregation_mode != "decode" and server.prefill_graph:
        total += 1536.0 if server.mla else 8.0 * _prefill_graphs(server, rel)
    return total


def _parallel(server: ServerShape) -> float:
    return server.tp * server.pp / 8 * 1024


def _activation_tokens(server: ServerShape, rel: Release) -> int:
    if server.disaggregation_mode == "decode":
        requests = server.max_running_requests or _decode_max_bs(server, rel) or 1
        return max(requests * (server.draft_tokens or 1), 2048)
    return max(_chunked_prefill_size(server, rel), 2048)


def _chunked_prefill_size(server: ServerShape, rel: Release) -> int:
    if server.chunked_prefill_size is not None:
        return server.chunked_prefill_size
    return _card_defaults(server, rel)[0]


def _decode_max_bs(server: ServerShape, rel: Release) -> int:
    if server.cuda_graph_max_bs is not None:
        return server.cuda_graph_max_bs
    maximum = _card_defaults(server, rel)[1]
    if rel.decode_capped_by_requests and server.max_running_requests is not None:
        maximum = min(maximum, server.max_running_requests)
    return maximum


def _card_defaults(server: ServerShape, rel: Release) -> tuple[int, int]:
    """Chunked prefill size and the largest decode graph, by the card's memory."""
    gib, few = server.gpu_mib / 1024, server.tp < 4
    if gib < 20:
        return 2048, 8
    if gib < 35:
        if rel.small_card_doubled:
            return 4096, 48 if few else 160
        return 2048, 24 if few else 80
    if gib < 60:
        return 4096, 32 if few else 160
    if gib < 160:
        return 8192, 256 if few else 512
    return 16384, 512


def _prefill_graphs(server: ServerShape, rel: Release) -> int:
    """How many prefill graphs are captured: denser for short prefills, up to the chunk."""
    maximum = _chunked_prefill_size(server, rel)
    if rel.pp_prefill_capped and server.pp > 1:
        maximum = min(maximum, _PP_PREFILL_CAP)
    steps = ((4, 32, 4), (48, 256, 16), (288, 512, 32), (576, 1024, 64), (1280, 4096, 256))
    count = sum(len(range(low, min(high, maximum) + 1, step)) for low, high, step in steps)
    return count + len(range(4608, maximum + 1, 512))


def _with_fraction(server: ServerShape, terms: list[tuple[str, float]], *, fixed_vlm: bool) -> Reserve:
    total = sum(size for _, size in terms)
    fraction = round((server.gpu_mib - total) / server.gpu_mib, 3)
    if server.vision_layers is not None and server.disaggregation_mode != "decode":
        if fixed_vlm:
            terms = [*terms, ("image encoder", float(_VLM_AFTER_CAPTURE))]
            fraction -= _VLM_AFTER_CAPTURE / server.gpu_mib
        else:
            factor = _vlm_factor(server)
            terms = [*terms, ("image encoder", fraction * (1 - factor) * server.gpu_mib)]
            fraction *= factor
    if fraction <= 0:
        raise PlanError(
            f"SGLang would set aside {total:,.0f} MiB of a card with {server.gpu_mib:,} MiB.",
            fix="Lower --chunked-prefill-size or --cuda-graph-max-bs, or give --mem-fraction-static.",
        )
    return Reserve(tuple(terms), fraction)


def _vlm_factor(server: ServerShape) -> float:
    """SGLang's cut for an image encoder: 5 %, and 10 % more for each size above a ViT-L/14."""
    score = (server.vision_layers or 24) * (server.vision_hidden or 1024) ** 2
    ratio = score / (24 * 1024**2)
    return 0.95 * max(0.8, min(1.05, 1.0 - 0.1 * (ratio - 1.0)))
