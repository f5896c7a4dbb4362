"""``kvarena demo``: a prefill and a decode process serve a text, and a third one checks their tokens."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import msgspec
from kvarena.plugin.byte_sizes import parse_bytes
from kvarena.plugin.commands import options
from kvarena.plugin.commands.demo.hosts import TwoHosts
from kvarena.plugin.commands.demo.report import DemoConsole
from kvarena.plugin.commands.demo.run import Demo, DemoOptions
from kvarena.plugin.commands.demo.text_input import InputError, cut_into_prompts, read_text
from kvarena.plugin.config import Settings, load_settings
from kvarena.plugin.engines.embedded.config import EngineConfig, ModelConfig
from kvarena.plugin.engines.embedded.requests import Request, prompt_tokens
from kvarena.plugin.observe.picture import check_picture, draw_arena

__all__ = ["add_parser", "run"]

_MEMORY_LIMIT = "24MiB"
_MAX_NEW_TOKENS = 1 << 16
_MAX_REQUESTS = 256
_MAX_GROWTHS = 1000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command's options."""
    parser = subparsers.add_parser(
        "demo",
        help="serve a text with a prefill and a decode process, and check every token",
        description="Serve a text with a prefill and a decode process over a KV pool that is sized after "
        "warm-up, move the pages between them, and compare every token with those of a single process. "
        "Exit status: 0 equal and sound, 1 not, 2 bad input.",
    )
    model, engine = ModelConfig(), EngineConfig()
    parser.add_argument(
        "--input", metavar="FILE", help="a UTF-8 text file (default: a passage that is shipped)"
    )
    parser.add_argument(
        "--requests", type=int, default=6, metavar="N", help="prompts to cut it into (%(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=32,
        metavar="N",
        help="tokens to generate for each (%(default)s)",
    )
    parser.add_argument(
        "--page-size", type=int, default=engine.page_size, metavar="N", help="tokens a page (%(default)s)"
    )
    parser.add_argument(
        "--chunk-pages",
        type=int,
        default=engine.chunk_pages,
        metavar="N",
        help="pages that one prefill step fills (%(default)s)",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=model.window,
        metavar="N",
        help="tokens that a sliding-window layer sees (%(default)s)",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help=f"memory that each process's pool may take (KVARENA_MEMORY_LIMIT, else {_MEMORY_LIMIT})",
    )
    parser.add_argument(
        "--transfer", metavar="ENGINE", help="what moves the pages (KVARENA_TRANSFER, else mooncake)"
    )
    parser.add_argument(
        "--device",
        type=options.device,
        default="cpu",
        metavar="DEVICE",
        help="cpu, cuda or cuda:1 (%(default)s)",
    )
    parser.add_argument(
        "--decode-device",
        type=options.device,
        metavar="DEVICE",
        help="where the decode process runs, if not with the prefill process: another GPU",
    )
    parser.add_argument(
        "--seed", type=int, default=model.seed, metavar="N", help="of the weights (%(default)s)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="control port on 127.0.0.1, for which the processes share a secret (default: a Unix socket)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="no secret for --port: every user of this host can then control the processes",
    )
    parser.add_argument(
        "--grow",
        type=int,
        default=0,
        metavar="N",
        help="times that each pool grows and gives back while requests are served (%(default)s)",
    )
    parser.add_argument(
        "--hosts",
        type=int,
        default=1,
        choices=(1, 2),
        help="2: prefill and decode in two network namespaces, whose link is cut once; needs root and "
        "iproute2 (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="log what each process does to standard error"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw both arenas over time (.png, .svg)")


def run(args: argparse.Namespace) -> int:
    """Run the demo; returns 0 if the tokens are equal and every invariant held, else 1.

    Raises
    ------
    KvArenaError
        Bad input; nothing was served.
    """
    _check_numbers(args)
    loaded = load_settings()
    limit = _limit(args, loaded)
    # A quarter is left for growth, where there is to be any.
    growth = limit // 4 if args.grow else 0
    settings = _settings(args, loaded, limit, growth)
    config, requests = _plan(args, limit)
    if growth:
        config = config.evolve(reserved_bytes=max(config.planned_bytes(), limit))
    if args.plot is not None:
        check_picture(args.plot)
    console = DemoConsole(quiet=args.json, progress=not args.verbose, requests=len(requests))
    with ExitStack() as around:
        hosts = around.enter_context(_two_hosts()) if args.hosts == 2 else None
        around.enter_context(console)
        demo = Demo(
            config,
            settings,
            requests,
            DemoOptions(
                decode_device=args.decode_device,
                port=args.port,
                insecure=args.insecure,
                growth=(args.grow, growth) if growth else None,
                hosts=hosts,
                verbose=args.verbose,
            ),
            on_event=console.event,
        )
        report = demo.run()
    console.report(report)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(report)).decode() + "\n")
    if args.plot is not None:
        draw_arena(
            [demo.histories[role] for role in ("prefill", "decode") if role in demo.histories], args.plot
        )
    return 0 if report.ok else 1


@contextmanager
def _two_hosts() -> Iterator[TwoHosts]:
    """Two hosts that are gone in the end, also when this process is asked to end."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        with TwoHosts() as hosts:
            yield hosts
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_numbers(args: argparse.Namespace) -> None:
    for name, value, minimum, maximum in (
        ("--requests", args.requests, 1, _MAX_REQUESTS),
        ("--max-new-tokens", args.max_new_tokens, 1, _MAX_NEW_TOKENS),
        ("--port", args.port, 0, 65535),
        ("--grow", args.grow, 0, _MAX_GROWTHS),
    ):
        if not minimum <= value <= maximum:
            raise InputError(f"{name} is {value}.", fix=f"Give {minimum} to {maximum}.")
    if args.plot is not None and not args.plot.name:
        raise InputError("--plot does not name a file.", fix="Give a file such as arena.png.")
    if args.insecure and not args.port:
        raise InputError("--insecure is about --port; a Unix socket needs no secret.", fix="Leave it out.")
    if args.hosts == 2 and args.port:
        raise InputError("--port is of no use with --hosts 2, whose client has a Unix socket.")
    if args.decode_device is not None and "cpu" in (args.device, args.decode_device):
        raise InputError(
            f"--decode-device {args.decode_device} with --device {args.device}: the pair needs two GPUs.",
            fix="Give --device cuda:0 --decode-device cuda:1.",
        )


def _limit(args: argparse.Namespace, settings: Settings) -> int:
    """Bytes that each process's pool may come to have."""
    limit = settings.memory_limit
    if args.memory_limit is not None:
        limit = parse_bytes(args.memory_limit, what="--memory-limit")
    if limit is None:
        limit = parse_bytes(_MEMORY_LIMIT)
    if limit < 1:
        raise InputError("--memory-limit is 0 bytes.", fix=f"Leave it out for {_MEMORY_LIMIT}.")
    return limit


def _settings(args: argparse.Namespace, loaded: Settings, limit: int, growth: int) -> Settings:
    transfer = (args.transfer,) if args.transfer else loaded.transfer or ("mooncake",)
    if args.hosts == 2 and transfer != ("mooncake",):
        raise InputError(
            f"--hosts 2 is about Mooncake over TCP; {', '.join(transfer)} would find both on one machine.",
            fix="Leave --transfer out.",
        )
    if args.device != "cpu":
        # The driver gives what the device has; the limit is the pool's own.
        maximum = limit - growth if loaded.pool_bytes is None else min(loaded.pool_bytes, limit - growth)
        return msgspec.structs.replace(loaded, transfer=transfer, pool_bytes=maximum)
    return msgspec.structs.replace(
        loaded, transfer=transfer, memory_limit=limit, headroom=loaded.headroom + growth
    )


def _plan(args: argparse.Namespace, limit: int) -> tuple[EngineConfig, list[Request]]:
    model = ModelConfig(window=args.window, seed=args.seed)
    text = read_text(args.input, max_bytes=limit // model.full_token_bytes)
    requests = [
        Request(rid, prompt_tokens(prompt), args.max_new_tokens)
        for rid, prompt in enumerate(cut_into_prompts(text, args.requests))
    ]
    longest = max(len(request.tokens) for request in requests) + args.max_new_tokens
    # A step as wide as no sequence can become would only take memory.
    longest = max(2, min(longest, limit // model.full_token_bytes))
    config = EngineConfig(
        model=model,
        device=args.device,
        page_size=args.page_size,
        chunk_pages=args.chunk_pages,
        context_length=longest,
        batch_sizes=_batch_sizes(len(requests)),
    )
    return config, requests


def _batch_sizes(requests: int) -> tuple[int, ...]:
    """The captured sizes that so many requests can use."""
    maximum = EngineConfig().batch_sizes
    return tuple(size for index, size in enumerate(maximum) if index == 0 or maximum[index - 1] < requests)
