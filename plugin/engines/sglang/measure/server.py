"""A server after capture: what it may be asked to do, why its steps cannot be measured, and what it is."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from kvarena.plugin.config import Settings
from kvarena.plugin.engines.sglang.measure.later import later_allocations
from kvarena.plugin.engines.sglang.measure.profile import flags_of
from kvarena.plugin.engines.sglang.measure.run import CudaMeter, Meter
from kvarena.plugin.engines.sglang.measure.steps import Workload
from kvarena.plugin.engines.sglang.measure.unmodified import floor_bytes
from kvarena.plugin.engines.sglang.request import config_view
from kvarena.plugin.ranks import Ranks

__all__ = ["MeasuredServer"]

_GIB = 1 << 30
_DRIVER = Path("/proc/driver/nvidia/version")


@final
@dataclass(frozen=True)
class MeasuredServer:
    """A server after capture, as far as sizing looks at it.

    Attributes
    ----------
    runner : ModelRunner
        After capture.
    server_args : ServerArgs
        As given, with what SGLang resolved.
    settings : Settings
        The operator's.
    ranks : Ranks
        All of the server's.
    unmodified_bytes : int
        What unmodified SGLang would have given the pool of this rank.
    backed_bytes : int
        What the pool holds by now.
    free_bytes : int
        Of the rank that has least, as SGLang measures it.
    page_bytes : int
        One page of every kind of KV.
    page_size : int
        Tokens of a page.
    bytes_per_token : float
        What one more token of the pool costs.
    meter : Meter, optional
        Instead of the one that looks at the card.
    """

    runner: Any
    server_args: Any
    settings: Settings
    ranks: Ranks
    unmodified_bytes: int
    backed_bytes: int
    free_bytes: int
    page_bytes: int
    page_size: int
    bytes_per_token: float
    meter: Meter | None = None
    config: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", config_view(self.server_args))

    @property
    def limit_is_given(self) -> bool:
        """Whether the operator gave ``--max-running-requests``."""
        return getattr(self.server_args, "max_running_requests", None) is not None

    def workload(self) -> Workload:
        """What the server may be asked to do."""
        runner, config = self.runner, self.config
        graphs = config.cuda_graph_config.decode
        disabled = str(getattr(graphs.backend, "value", graphs.backend)).lower() == "disabled"
        chunked = config.chunked_prefill_size or 0
        return Workload(
            role=config.disaggregation_mode,
            limit=int(runner.max_running_requests),
            graph_requests=0 if disabled else int(graphs.max_bs or 0),
            chunk=int(chunked if chunked > 0 else config.max_prefill_tokens),
            context=int(runner.model_config.context_len),
            pool_tokens=int(runner.max_total_num_tokens),
            mla=bool(getattr(runner, "use_mla_backend", False)),
            prefix_capacity=_prefix_capacity(),
        )

    def refusal(self) -> str:
        """Why the steps cannot be measured; empty: they can."""
        runner, config = self.runner, self.config
        reasons = {
            "--speculative-algorithm: SGLang's dummies are then another kind of step": not (
                runner.spec_algorithm.is_none()
            ),
            "--enable-two-batch-overlap: SGLang's dummies do not overlap": getattr(
                config, "enable_two_batch_overlap", False
            ),
            "context parallelism": getattr(config, "attn_cp_size", 1) > 1,
            "--enable-kv-canary": getattr(runner, "canary_manager", None) is not None,
            "a model that does not generate": not getattr(runner, "is_generation", True),
            "an encoder-decoder model": getattr(runner.model_config, "is_encoder_decoder", False),
            "a diffusion language model": getattr(config, "dllm_algorithm", None) is not None,
            f"{runner.device}": not str(runner.device).startswith("cuda") and self.meter is None,
        }
        found = [name for name, applies in reasons.items() if applies]
        return f"steps are not measured with {', '.join(found)}" if found else ""

    def terms(self, work: Workload) -> dict[str, Any]:
        """Margin, floor, later allocations and headroom, as `decide` takes them."""
        pages = -(-work.chunk // self.page_size)
        later = later_allocations(
            self.config,
            chunk_bytes=pages * self.page_bytes,
            mla=work.mla,
            vocabulary=int(self.runner.model_config.vocab_size),
            input_logprobs=self.settings.input_logprobs,
        )
        return {
            "margin": self.settings.peak_margin,
            "floor_bytes": floor_bytes(self.config),
            "later": later,
            "headroom_bytes": self.settings.headroom,
        }

    def key(self) -> dict[str, str]:
        """What a kept measurement holds for."""
        import torch
        from kvarena.plugin.engines.sglang.runtime import runtime

        runner, model = self.runner, self.runner.model_config.hf_config
        told = {
            "release": runtime.release,
            "torch": str(torch.__version__),
            "python": sys.version.split()[0],
            "card": self._card(),
            "driver": _driver(),
            "rank": f"{getattr(runner, 'tp_rank', 0)}/{getattr(runner, 'pp_rank', 0)}",
            "model": repr(sorted(model.to_dict().items()) if hasattr(model, "to_dict") else model),
            "limit": str(runner.max_running_requests),
        }
        return told | {f"--{name}": value for name, value in flags_of(self.server_args).items()}

    def measuring(self) -> Meter:
        """Looks at this rank's card."""
        return CudaMeter(self.runner.gpu_id) if self.meter is None else self.meter

    def free_now(self) -> int:
        """Bytes, as SGLang measures them: after torch's cache is emptied."""
        if self.meter is not None:
            return self.free_bytes
        import torch
        from sglang.srt.utils.common import get_available_gpu_memory

        torch.cuda.synchronize()
        return int(get_available_gpu_memory(self.runner.device, self.runner.gpu_id) * _GIB)

    def device_bytes(self) -> int:
        """No figure of a measurement is larger."""
        import torch

        if self.meter is not None:
            return self.free_bytes + self.backed_bytes
        return int(torch.cuda.get_device_properties(self.runner.gpu_id).total_memory)

    def _card(self) -> str:
        import torch

        if self.meter is not None:
            return str(self.runner.device)
        about = torch.cuda.get_device_properties(self.runner.gpu_id)
        return f"{about.name} {about.total_memory}"


def _driver() -> str:
    """The display driver's own line; where it shows none, the CUDA version that it serves."""
    try:
        return _DRIVER.read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, ValueError, IndexError):
        pass
    import torch

    if not torch.cuda.is_available():
        return "none"
    from cuda.bindings import driver

    code, version = driver.cuDriverGetVersion()
    return f"{int(code)} {version}"


def _prefix_capacity() -> int:
    """MLA: how many tokens of a prefix are written out at once."""
    try:
        from sglang.srt.environ import envs

        return int(envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get())
    except (ImportError, AttributeError):
        return 128 * 1024
