"""One engine in one process: the model sees its KV, and neither pool nor batch changes a token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kvarena.plugin.engines.embedded.config import EOS, FULL, WINDOW, EngineConfig
from kvarena.plugin.engines.embedded.engine import Engine
from kvarena.plugin.engines.embedded.reference import SingleServer
from kvarena.plugin.engines.embedded.requests import Request, Result

Generate = Callable[..., dict[int, Result]]
MakeEngine = Callable[..., Engine]


def _tokens(results: dict[int, Result]) -> dict[int, list[int]]:
    return {rid: result.tokens for rid, result in results.items()}


def test_late_backed_equals_eager(generate: Generate, make_engine: MakeEngine, texts: list[Request]) -> None:
    late = make_engine()
    eager = make_engine(eager_bytes=late.pool.total_bytes)

    assert late.pool.finalized
    assert late.pool.total_bytes < late.pool.arena.reserved_bytes
    assert _tokens(generate(texts, late)) == _tokens(generate(texts, eager))
    assert late.report()["capacities"] == eager.report()["capacities"]
    assert late.report()["problems"] == eager.report()["problems"] == []


def test_tokens_do_not_depend_on_the_batch(
    generate: Generate, make_engine: MakeEngine, texts: list[Request]
) -> None:
    together = generate(texts)
    one_by_one = make_engine()
    for request in texts:
        alone = generate([request], one_by_one)[request.rid]
        assert alone.tokens == together[request.rid].tokens


def test_the_answer_is_no_single_repeated_byte(generate: Generate, texts: list[Request]) -> None:
    for result in generate(texts).values():
        assert len(set(result.tokens)) > len(result.tokens) // 2


@pytest.mark.parametrize("seed", range(4))
def test_choices_are_far_above_rounding(
    generate: Generate,
    make_engine: MakeEngine,
    texts: list[Request],
    change_model: Callable[..., EngineConfig],
    small: EngineConfig,
    seed: int,
) -> None:
    config = change_model(small, seed=seed)
    together = generate(texts, make_engine(config))
    noise = 0.0
    one_by_one = make_engine(config)
    for request in texts:
        alone = generate([request], one_by_one)[request.rid]
        assert alone.tokens == together[request.rid].tokens
        pairs = zip(alone.logits, together[request.rid].logits, strict=True)
        noise = max(noise, *(abs(a - b) for a, b in pairs))
    margin = min(result.margin for result in together.values() if result.margin is not None)
    assert margin > 10 * noise


@pytest.mark.parametrize("name", [FULL, WINDOW])
@pytest.mark.parametrize("part", ["k", "v"])
def test_one_corrupt_page_changes_the_answer(
    make_engine: MakeEngine, generate: Generate, texts: list[Request], name: str, part: str
) -> None:
    request = texts[-1]
    right = generate([request])[request.rid].tokens
    engine = make_engine()
    results: list[Result] = []
    server = SingleServer(engine, results.append)
    server.submit(request)
    while not server.batch.running:
        server.step()
    sequence = server.batch.running[0]
    # The last whole page that both kinds of layers still see.
    page = engine.book.physical_pages(sequence)[name][-2]
    view = engine.pool.k_view(name, 0) if part == "k" else engine.pool.v_view(name, 0)
    view[page] = -view[page] + 1.0
    while server.busy:
        server.step()

    assert results[0].tokens[0] == right[0]
    assert results[0].tokens != right


def test_what_left_the_window_does_not_matter(
    make_engine: MakeEngine, generate: Generate, texts: list[Request]
) -> None:
    request = texts[-1]
    right = generate([request])[request.rid].tokens
    engine = make_engine()
    results: list[Result] = []
    server = SingleServer(engine, results.append)
    server.submit(request)
    while not server.batch.running:
        server.step()
    pool, held = engine.pool, engine.book.physical_pages(server.batch.running[0])
    # The full side grows from the low end of the same bytes.
    full_end = (max(held[FULL]) + 1) * pool.page_bytes(FULL)
    first = -(-full_end // pool.page_bytes(WINDOW))
    others = [page for page in range(first, pool.num_pages(WINDOW)) if page not in held[WINDOW]]
    assert others
    for layer in range(engine.config.model.window_layer_num):
        engine.pool.k_view(WINDOW, layer)[others] = 1e3
        engine.pool.v_view(WINDOW, layer)[others] = 1e3
    while server.busy:
        server.step()

    assert results[0].tokens == right


def test_window_pages_are_let_go_in_prefill_and_decode(make_engine: MakeEngine, texts: list[Request]) -> None:
    engine = make_engine()
    results: list[Result] = []
    server = SingleServer(engine, results.append)
    request = Request(0, texts[-1].tokens, 24)
    server.submit(request)
    widest = 0
    while server.busy:
        server.step()
        for sequence in server.batch.running:
            held = len(sequence.pages) - sequence.window_start
            assert len(engine.book.physical_pages(sequence)[WINDOW]) == held
            widest = max(widest, held)

    assert len(results[0].tokens) > 1
    assert 0 < widest <= engine.config.window_pages
    assert engine.book.leaks() == []


def test_compaction_between_steps_is_invisible(
    make_engine: MakeEngine, generate: Generate, texts: list[Request]
) -> None:
    right = _tokens(generate(texts))
    engine = make_engine()
    results: dict[int, Result] = {}
    server = SingleServer(engine, lambda result: results.__setitem__(result.rid, result))
    for request in texts:
        server.submit(request)
    while server.busy:
        server.step()
        engine.allocator.compact()

    assert engine.report()["moved_pages"] > 0
    assert _tokens(results) == right


def test_eos_ends_an_answer(make_engine: MakeEngine, texts: list[Request]) -> None:
    engine = make_engine()
    results: list[Result] = []
    server = SingleServer(engine, results.append)
    server.submit(texts[3])
    while not server.batch.running or len(server.batch.running[0].generated) < 3:
        server.step()
    # From here on there is no other word.
    engine.model._banned[:EOS] = -torch.inf
    while server.busy:
        server.step()

    assert results[0].reason == "eos"
    assert results[0].tokens[-1] == EOS
    assert len(results[0].tokens) == 4
    assert engine.book.leaks() == []


def test_more_requests_than_rows_queue(
    make_engine: MakeEngine, generate: Generate, texts: list[Request]
) -> None:
    engine = make_engine()
    many = [Request(rid, texts[rid % len(texts)].tokens, 6) for rid in range(3 * engine.config.max_running)]
    results = generate(many, engine)

    assert len(results) == len(many)
    assert all(result.reason in ("length", "eos") for result in results.values())
    assert engine.book.leaks() == []


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_narrow_kv_runs(
    make_engine: MakeEngine,
    generate: Generate,
    texts: list[Request],
    small: EngineConfig,
    change_model: Callable[..., EngineConfig],
    kv_dtype: str,
) -> None:
    engine = make_engine(change_model(small, kv_dtype=kv_dtype))
    wide = make_engine(small)
    assert engine.pool.page_bytes(FULL) * 2 == wide.pool.page_bytes(FULL)
    results = generate(texts[:2], engine)
    assert all(len(result.tokens) == 10 for result in results.values())
