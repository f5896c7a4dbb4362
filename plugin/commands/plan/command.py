"""``kvarena plan``: how much KV cache a model keeps and a card holds, before there is a card."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvarena.plugin.byte_sizes import MIB, format_bytes, parse_bytes
from kvarena.plugin.commands.plan.cards import CARDS, card_bytes
from kvarena.plugin.commands.plan.errors import DoesNotFitError, PlanError

if TYPE_CHECKING:
    from kvarena.plugin.commands.plan.capacity_plan import Gpu, PlanRequest
    from kvarena.plugin.commands.plan.geometry import ModelGeometry
    from kvarena.plugin.commands.plan.read import ReadModel
    from kvarena.plugin.commands.plan.weights import WeightEstimate

__all__ = ["add_parser", "run"]

EXIT_DOES_NOT_FIT = 1

_KV_DTYPES = ("auto", "bfloat16", "bf16", "float16", "float32", "fp8_e4m3", "fp8_e5m2", "fp4_e2m1")
#: Options that are about what else lives on a card.
_OF_A_CARD = (
    *("weights", "runtime_memory", "graph_memory", "activation_memory", "mem_fraction_static"),
    *("disaggregation_mode", "chunked_prefill_size", "cuda_graph_max_bs"),
    *("speculative_num_draft_tokens", "disable_prefill_graph", "disable_decode_graph", "language_only"),
)
_NEWEST_SGLANG = "0.5.23"
_STATE_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_parser(subparsers: Any) -> None:
    """Declare the command's options."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "plan",
        help="capacity of a model's KV cache, before there is a GPU",
        description="Bytes per token, page and request of a model's caches, and how much of them a card "
        "holds when the cache is sized before and after CUDA graph capture.",
    )
    parser.add_argument("model", nargs="?", help="a config.json, or the folder that holds one")
    layout = parser.add_argument_group("layout")
    layout.add_argument("--tp", type=_whole(1, 4096), default=1, metavar="N", help="tensor-parallel size")
    layout.add_argument("--pp", type=_whole(1, 4096), default=1, metavar="N", help="pipeline stages")
    layout.add_argument(
        "--dp-attention",
        type=_whole(1, 4096),
        default=1,
        metavar="N",
        help="groups of attention data parallelism",
    )
    layout.add_argument(
        "--draft-layers", type=_whole(0, 1024), default=0, metavar="N", help="layers of an EAGLE or MTP draft"
    )
    layout.add_argument("--pp-layers", metavar="N,N,...", help="layers of each stage, if not even")
    layout.add_argument("--page-size", type=_whole(1, 1 << 20), default=1, metavar="TOKENS")
    layout.add_argument("--kv-cache-dtype", choices=_KV_DTYPES, default="auto")
    layout.add_argument("--mamba-ssm-dtype", choices=_STATE_DTYPES, default="auto")
    layout.add_argument("--mamba-conv-dtype", choices=_STATE_DTYPES, default="auto")
    layout.add_argument(
        "--context-len", type=_whole(1, 1 << 40), metavar="TOKENS", help="length of a request"
    )
    layout.add_argument(
        "--transfer-bandwidth",
        metavar="SIZE",
        help="bytes a second of one card's link, for prefill and decode",
    )
    memory = parser.add_argument_group("memory")
    size = memory.add_mutually_exclusive_group()
    size.add_argument(
        "--gpu-memory", metavar="SIZE", help=f"one card: a size as nvidia-smi reports, or {', '.join(CARDS)}"
    )
    size.add_argument("--pool-memory", metavar="SIZE", help="the pool itself, its sink included")
    memory.add_argument(
        "--weights", metavar="SIZE", help="the whole model's weights (default: from its files)"
    )
    memory.add_argument("--runtime-memory", metavar="SIZE", help="taken before the model is loaded")
    memory.add_argument("--graph-memory", metavar="SIZE", help="CUDA graphs, as measured")
    memory.add_argument("--activation-memory", metavar="SIZE", help="activations outside of graphs")
    memory.add_argument("--mem-fraction-static", type=_fraction, metavar="F")
    memory.add_argument("--swa-full-tokens-ratio", type=_fraction, default=0.8, metavar="F")
    memory.add_argument("--mamba-full-memory-ratio", type=_ratio, default=0.9, metavar="F")
    memory.add_argument("--max-running-requests", type=_whole(1, 1 << 24), metavar="N")
    _add_server_options(parser.add_argument_group("server, for SGLang's guess"))
    _add_geometry_options(parser.add_argument_group("geometry, instead of a file"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print data instead of tables")
    output.add_argument("--plot", metavar="FILE.png", help="draw the card (needs kvarena[plot])")


def _add_server_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sglang", metavar="VERSION", help=f"release, 0.5.16 to 0.5.23 (default: {_NEWEST_SGLANG})"
    )
    group.add_argument(
        "--engine",
        choices=("sglang", "none"),
        default="sglang",
        help="count the layers that SGLang allocates, or what the architecture alone needs",
    )
    group.add_argument("--disaggregation-mode", choices=("null", "prefill", "decode"))
    group.add_argument("--chunked-prefill-size", type=_whole(1, 1 << 24), metavar="TOKENS")
    group.add_argument("--cuda-graph-max-bs", type=_whole(1, 1 << 16), metavar="N")
    group.add_argument("--speculative-num-draft-tokens", type=_whole(1, 1024), metavar="N")
    group.add_argument("--disable-prefill-graph", action="store_true")
    group.add_argument("--disable-decode-graph", action="store_true")
    group.add_argument("--language-only", action="store_true", help="no image encoder on this server")


def _add_geometry_options(group: argparse._ArgumentGroup) -> None:
    layers, dim = _whole(1, 10_000), _whole(1, 1 << 24)
    group.add_argument("--full-layers", type=layers, default=0, metavar="N")
    group.add_argument("--window-layers", type=layers, default=0, metavar="N")
    group.add_argument("--window", type=_whole(1, 1 << 40), metavar="TOKENS")
    group.add_argument("--state-layers", type=layers, default=0, metavar="N")
    group.add_argument("--kv-heads", type=dim, metavar="N")
    group.add_argument("--head-dim", type=dim, metavar="N")
    group.add_argument("--v-head-dim", type=dim, metavar="N")
    group.add_argument("--window-kv-heads", type=dim, metavar="N")
    group.add_argument("--window-head-dim", type=dim, metavar="N")
    group.add_argument("--kv-lora-rank", type=dim, metavar="N", help="MLA, with --qk-rope-head-dim")
    group.add_argument("--qk-rope-head-dim", type=dim, metavar="N")
    group.add_argument("--state-elements", type=_whole(1, 1 << 40), metavar="N", help="of one layer")


def run(args: argparse.Namespace) -> int:
    """CapacityPlan, and print. 0: it fits (or nothing was asked to); 1: it does not.

    Raises
    ------
    PlanError
        Input that no plan can be made from.
    """
    from kvarena.plugin.commands.plan.capacity_plan import make_plan
    from kvarena.plugin.commands.plan.output import plan_data

    model, estimate, read = _model(args)
    request, notes = _request(args, model, read)
    plan = make_plan(model, request, estimate=estimate, notes=notes)
    if args.plot:
        from kvarena.plugin.commands.plan.plot import plot_plan

        plot_plan(plan, args.plot)
    if args.json:
        sys.stdout.write(json.dumps(plan_data(plan), indent=2, allow_nan=False) + "\n")
    else:
        from kvarena.plugin.commands.plan.render import show
        from rich.console import Console

        # Into a pipe or a file, lines are as long as they need to be.
        show(plan, Console(width=None if sys.stdout.isatty() else 160))
    if plan.problem is not None and not isinstance(plan.problem, DoesNotFitError):
        sys.stdout.flush()
        raise plan.problem
    return 0 if plan.fits and plan.problem is None else EXIT_DOES_NOT_FIT


def _model(args: argparse.Namespace) -> tuple[ModelGeometry, WeightEstimate | None, ReadModel | None]:
    from kvarena.plugin.commands.plan.explicit import GeometryOptions
    from kvarena.plugin.commands.plan.load import load_config, quantization_beside
    from kvarena.plugin.commands.plan.read import read_model
    from kvarena.plugin.commands.plan.weights import estimate_weights

    names = GeometryOptions.__dataclass_fields__
    options = GeometryOptions(**{name: getattr(args, name) for name in names})
    stated = [name for name in names if getattr(args, name)]
    if args.model is None:
        if not options.given:
            raise PlanError(
                "There is no model.", fix="Give a config.json, or --full-layers, --kv-heads and --head-dim."
            )
        return options.geometry(), None, None
    if stated:
        option = "--" + stated[0].replace("_", "-")
        raise PlanError(f"{option} and a file both describe the model.", fix="Give one of them.")
    config = load_config(args.model)
    if "quantization_config" not in config and (beside := quantization_beside(args.model)) is not None:
        config["quantization_config"] = beside
    read = read_model(config, sglang=_release(args))
    # Weights are the same whoever counts the cache.
    every_layer = read if args.engine == "sglang" else read_model(config, sglang=_NEWEST_SGLANG)
    return read.geometry, estimate_weights(every_layer, towers=not args.language_only), read


def _release(args: argparse.Namespace) -> str | None:
    """The release of SGLang whose layers are counted; `None` for the architecture alone."""
    from kvarena.plugin.commands.plan.sglang_reserve import release

    name = release(args.sglang or _NEWEST_SGLANG).name
    return name if args.engine == "sglang" else None


def _request(
    args: argparse.Namespace, model: ModelGeometry, read: ReadModel | None
) -> tuple[PlanRequest, list[str]]:
    from kvarena.plugin.commands.plan.capacity import Split
    from kvarena.plugin.commands.plan.capacity_plan import PlanRequest, choose_dtypes

    for name in _OF_A_CARD:
        if args.gpu_memory is None and getattr(args, name) not in (None, False):
            option = "--" + name.replace("_", "-")
            raise PlanError(f"{option} says nothing without a card.", fix="Give --gpu-memory, too.")
    dtypes, notes = choose_dtypes(model, args.kv_cache_dtype, args.mamba_conv_dtype, args.mamba_ssm_dtype)
    card = (
        _card(args, model, read.top if read is not None else {}, notes)
        if args.gpu_memory is not None
        else None
    )
    pool = (
        None if args.pool_memory is None else parse_bytes(args.pool_memory, what="--pool-memory", zero=False)
    )
    bandwidth = None
    if args.transfer_bandwidth is not None:
        bandwidth = parse_bytes(args.transfer_bandwidth, what="--transfer-bandwidth", zero=False)
    split = Split(args.swa_full_tokens_ratio, args.max_running_requests, args.mamba_full_memory_ratio)
    request = PlanRequest(
        tp=args.tp,
        pp=args.pp,
        partition=_partition(args.pp_layers),
        page_size=args.page_size,
        dtypes=dtypes,
        split=split,
        context_len=args.context_len,
        card=card,
        pool_bytes=pool,
        sglang=_release(args),
        dp=args.dp_attention,
        draft_layers=args.draft_layers,
        bandwidth=bandwidth,
        hybrid_window=bool(args.window_layers) if read is None else _hybrid_window(read),
    )
    return request, notes


def _hybrid_window(read: ReadModel) -> bool:
    return read.sglang is not None and read.sglang.hybrid_window


def _card(args: argparse.Namespace, model: ModelGeometry, config: Mapping[str, Any], notes: list[str]) -> Gpu:
    from kvarena.plugin.commands.plan.capacity_plan import RUNTIME_BYTES, Gpu
    from kvarena.plugin.commands.plan.load import stored_weight_bytes

    weights = None if args.weights is None else parse_bytes(args.weights, what="--weights", zero=False)
    if weights is None and args.model and (found := stored_weight_bytes(args.model)) is not None:
        weights, where = found
        notes.append(f"Weights are what lies beside the configuration: {format_bytes(weights)} ({where}).")
    total = card_bytes(args.gpu_memory)
    if total < MIB:
        raise PlanError(f"--gpu-memory is {total} bytes.", fix="Give at least 1 MiB.")

    def given(text: str | None, what: str) -> int | None:
        return None if text is None else parse_bytes(text, what=what)

    runtime = given(args.runtime_memory, "--runtime-memory")
    if runtime is None:
        runtime = RUNTIME_BYTES
        notes.append(
            f"{format_bytes(runtime)} are taken before the model is loaded, as measured on an H200: "
            "--runtime-memory."
        )
    return Gpu(
        total_bytes=total,
        runtime_bytes=runtime,
        weights_bytes=weights,
        graph_bytes=given(args.graph_memory, "--graph-memory"),
        activation_bytes=given(args.activation_memory, "--activation-memory") or 0,
        mem_fraction_static=args.mem_fraction_static,
        sglang=args.sglang or _NEWEST_SGLANG,
        server=_server(args, model, config, total),
    )


def _server(args: argparse.Namespace, model: ModelGeometry, config: Mapping[str, Any], total: int) -> Any:
    from kvarena.plugin.commands.plan.sglang_reserve import ServerShape

    vision = config.get("vision_config")
    sees = isinstance(vision, dict) and not args.language_only

    def of_vision(key: str, default: int) -> int | None:
        value = vision.get(key) if isinstance(vision, dict) else None
        known = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 20
        return (value if known else default) if sees else None

    return ServerShape(
        gpu_mib=total // MIB,
        tp=args.tp,
        pp=args.pp,
        mla=model.mla,
        disaggregation_mode=args.disaggregation_mode or "null",
        chunked_prefill_size=args.chunked_prefill_size,
        cuda_graph_max_bs=args.cuda_graph_max_bs,
        max_running_requests=args.max_running_requests,
        draft_tokens=args.speculative_num_draft_tokens,
        prefill_graph=not args.disable_prefill_graph,
        decode_graph=not args.disable_decode_graph,
        vision_layers=of_vision("num_hidden_layers", 24),
        vision_hidden=of_vision("hidden_size", 1024),
    )


def _partition(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [_whole(1, 10_000)(part) for part in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise PlanError(f"--pp-layers {text!r}: {error}.", fix="Write it like 20,20,21.") from error


def _whole(minimum: int, maximum: int) -> Any:
    """A parser of whole numbers in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text[:40]} is not from {minimum} to {maximum}")
        return value

    return parse


def _fraction(text: str) -> float:
    value = _ratio(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text[:40]} is not above 0 and up to 1")
    return value


def _ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from None
    if not 0 < value < 1e6:  # NaN fails, too
        raise argparse.ArgumentTypeError(f"{text[:40]} is not above 0")
    return value
