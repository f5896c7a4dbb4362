"""SGLang's guess: figures worked out from its releases, and two that were measured."""

from __future__ import annotations

import pytest
from kvarena.plugin.commands.plan.errors import PlanError
from kvarena.plugin.commands.plan.sglang_reserve import (
    RELEASES,
    ServerShape,
    graph_reserve_mib,
    release,
    reserve_after,
    reserve_before,
)

H200, H100, A10, RTX_5090 = 143_771, 81_559, 23_028, 32_607


@pytest.mark.parametrize(
    ("server", "version", "mib"),
    [
        # 8192 tokens of prefill, decode graphs to 256, 58 prefill graphs.
        (ServerShape(H200), "0.5.23", 512 + 12288 + 128 + 512 + 464),
        (ServerShape(H200, tp=8), "0.5.23", 512 + 12288 + 1024 + 1024 + 464),
        # 2048 tokens make 42 graphs; the sum is below 10 GiB, which a large card keeps anyway.
        (ServerShape(H200, chunked_prefill_size=2048), "0.5.23", 10240),
        # 24 decode graphs and 2048 tokens before 0.5.20, twice that from then on; no floor here.
        (ServerShape(A10), "0.5.19", 512 + 3072 + 128 + 48 + 42 * 8),
        (ServerShape(A10), "0.5.20", 512 + 6144 + 128 + 96 + 50 * 8),
        (ServerShape(RTX_5090, tp=4), "0.5.23", 512 + 6144 + 512 + 320 + 50 * 8),
        # MLA: a lump for prefill graphs.
        (ServerShape(H200, mla=True), "0.5.23", 512 + 12288 + 128 + 512 + 1536),
        # Decode of a PD pair: 256 requests are below 2048 tokens, and the floor is above all that.
        (ServerShape(H200, disaggregation_mode="decode"), "0.5.23", 10240),
        (
            ServerShape(H200, disaggregation_mode="decode", cuda_graph_max_bs=4096, draft_tokens=2),
            "0.5.23",
            512 + 12288 + 128 + 8192,
        ),
        (ServerShape(H200, disaggregation_mode="prefill"), "0.5.23", 512 + 12288 + 128 + 464),
        (ServerShape(H200, decode_graph=False, prefill_graph=False), "0.5.23", 512 + 12288 + 128),
        # A card of 192 GB: 16384 tokens, 74 prefill graphs; with pipeline stages they stop at 8192.
        (ServerShape(183_359), "0.5.23", 512 + 24576 + 128 + 1024 + 74 * 8),
        (ServerShape(183_359, pp=2), "0.5.23", 512 + 24576 + 256 + 1024 + 58 * 8),
        (ServerShape(183_359, pp=2), "0.5.18", 512 + 24576 + 256 + 1024 + 74 * 8),
    ],
)
def test_the_guess_before_capture(server, version, mib):
    assert reserve_before(server, release(version)).mib == mib


@pytest.mark.parametrize(
    ("version", "mib"), [("0.5.16", 640), ("0.5.17", 640), ("0.5.18", 1664), ("0.5.23", 1664)]
)
def test_what_is_kept_after_capture(version, mib):
    assert reserve_after(ServerShape(H200), release(version)).mib == mib


@pytest.mark.parametrize(("version", "max_bs"), [("0.5.21", 256), ("0.5.22", 64)])
def test_decode_graphs_stop_at_the_running_requests_from_0_5_22_on(version, max_bs):
    server = ServerShape(H200, max_running_requests=64, disaggregation_mode="decode")
    assert graph_reserve_mib(server, release(version)) == 2 * max_bs


def test_fractions_are_those_that_a_server_resolved():
    # SGLang 0.5.17 on an H200: 0.929 with unified memory, 0.996 with post-capture sizing.
    assert (
        reserve_before(ServerShape(H200, chunked_prefill_size=2048), release("0.5.17")).mem_fraction_static
        == 0.929
    )
    assert reserve_after(ServerShape(H200), release("0.5.17")).mem_fraction_static == 0.996


def test_an_image_encoder_takes_its_share():
    # A ViT-L/14: 5 % before capture; 8 GiB after it, from 0.5.20 on.
    server = ServerShape(H100, vision_layers=24, vision_hidden=1024)
    plain = ServerShape(H100)
    for version in ("0.5.19", "0.5.23"):
        rel = release(version)
        before = reserve_before(server, rel).mem_fraction_static
        assert before == pytest.approx(0.95 * reserve_before(plain, rel).mem_fraction_static)
    after = reserve_after(plain, release("0.5.23")).mem_fraction_static
    assert reserve_after(server, release("0.5.23")).mem_fraction_static == pytest.approx(after - 8192 / H100)
    old = reserve_after(plain, release("0.5.19")).mem_fraction_static
    assert reserve_after(server, release("0.5.19")).mem_fraction_static == pytest.approx(0.95 * old)
    # The decode side of a PD pair encodes no images.
    decode = ServerShape(H100, vision_layers=24, vision_hidden=1024, disaggregation_mode="decode")
    assert dict(reserve_before(decode, release("0.5.23")).terms).get("image encoder") is None


def test_a_release_that_was_not_read_is_refused():
    with pytest.raises(PlanError, match=r"'0\.5\.99'.*0\.5\.23"):
        release("0.5.99")
    assert len(RELEASES) == 8


def test_a_card_smaller_than_the_guess_is_refused():
    with pytest.raises(PlanError, match="of a card with 4,000 MiB"):
        reserve_before(ServerShape(4_000), release("0.5.23"))
