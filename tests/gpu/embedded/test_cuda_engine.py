"""The embedded engine on CUDA: graphs captured over a sink replay into a pool that was backed later."""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable

import pytest
from kvarena.plugin.commands.cli import main
from kvarena.plugin.engines.embedded import control
from kvarena.plugin.engines.embedded.decode import DecodeServer
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.prefill import PrefillServer
from kvarena.plugin.engines.embedded.reference import SingleServer
from kvarena.plugin.engines.embedded.requests import Request, Result

pytestmark = pytest.mark.gpu
MakeEngine = Callable[..., Engine]


def _serve(engine: Engine, requests: list[Request], *, compact: bool = False) -> dict[int, Result]:
    results: dict[int, Result] = {}
    server = SingleServer(engine, lambda result: results.__setitem__(result.rid, result))
    for request in requests:
        server.submit(request)
    while server.busy:
        server.step()
        if compact:
            engine.allocator.compact()
    return results


def _tokens(results: dict[int, Result]) -> dict[int, list[int]]:
    return {rid: result.tokens for rid, result in results.items()}


def test_steps_captured_before_backing_equal_an_eager_pools(
    make_engine: MakeEngine, texts: list[Request], device: str
) -> None:
    late = make_engine()
    events = late.lifecycle.timeline.as_dicts()
    captured = next(event for event in events if event["name"] == "captured")
    assert captured["details"]["how"] == ("graphs" if device == "cuda" else "plain")
    assert captured["nbytes"] < late.pool.arena.backed_bytes

    eager = make_engine(eager_bytes=late.pool.total_bytes)
    plain = make_engine(eager_bytes=late.pool.total_bytes, captured=False)
    answers = [_serve(engine, texts) for engine in (late, eager, plain)]
    assert _tokens(answers[0]) == _tokens(answers[1]) == _tokens(answers[2])
    # An answer may be the end mark alone; the others are no single repeated byte.
    told = [result.tokens for result in answers[0].values() if len(result.tokens) > 1]
    assert len(told) > 3
    assert all(len(set(tokens)) > 1 for tokens in told)
    assert late.report()["capacities"] == eager.report()["capacities"]
    for engine in (late, eager, plain):
        assert engine.report()["problems"] == []


def test_margins_are_far_above_rounding(make_engine: MakeEngine, texts: list[Request]) -> None:
    engine = make_engine()
    together = _serve(engine, texts)
    noise = 0.0
    for request in texts:
        alone = _serve(engine, [request])[request.rid]
        assert alone.tokens == together[request.rid].tokens
        pairs = zip(alone.logits, together[request.rid].logits, strict=True)
        noise = max(noise, *(abs(a - b) for a, b in pairs))
    margin = min(result.margin for result in together.values() if result.margin is not None)
    assert margin > 10 * noise


def test_graphs_see_pages_that_compaction_moved(make_engine: MakeEngine, texts: list[Request]) -> None:
    engine = make_engine()
    right = _tokens(_serve(engine, texts))
    assert _tokens(_serve(engine, texts, compact=True)) == right
    assert engine.report()["moved_pages"] > 0


def test_pair_over_device_copies(make_engine: MakeEngine, texts: list[Request]) -> None:
    results: dict[int, Result] = {}

    def hear(message: control.Message) -> None:
        if isinstance(message, control.Finished):
            results[message.result.rid] = message.result

    decode, prefill = DecodeServer(make_engine(), hear), PrefillServer(make_engine(), hear)
    try:
        prefill.connect(decode.hub.address)
        for request in texts:
            decode.submit(request)
        end = time.monotonic() + 60
        while len(results) < len(texts) and time.monotonic() < end:
            prefill.step()
            decode.step()
    finally:
        prefill.close()
        decode.close()
    assert _tokens(results) == _tokens(_serve(make_engine(), texts))


def test_demo(capsys: pytest.CaptureFixture[str], device: str) -> None:
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("Mooncake is not installed on this machine")
    status = main(["demo", "--device", device, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert status == 0
