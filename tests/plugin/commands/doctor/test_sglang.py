"""What the doctor says of an SGLang: one that looks like none it knows, and real ones."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from kvarena.plugin.commands.doctor import sglang
from kvarena.plugin.commands.doctor.findings import Finding
from kvarena.plugin.commands.doctor.sglang import examine_sglang
from kvarena.plugin.config import Settings

ROOT = Path(__file__).parents[4]
#: Only where it is asked for: importing SGLang twice takes most of a minute.
CACHE = os.environ.get("KVARENA_CONTRACT_CACHE")
RELEASES = {"0.5.20": "transformers-5.12", "0.5.23": "transformers-5.19"}
MODEL = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 128,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "torch_dtype": "bfloat16",
}
# The same stand-ins for Triton and torchvision as in tests/sglang.
STAND_INS = f"""
import sys
if any("sglang_probe" in argument for argument in sys.orig_argv):
    import importlib.util
    spec = importlib.util.spec_from_file_location("mocks", {str(ROOT / "tests/sglang/mocks.py")!r})
    mocks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mocks)
    mocks.install()
"""


def _examine(arguments: str | None, *, enable: bool = True) -> list[Finding]:
    return list(examine_sglang(Settings(enable=enable), arguments))


def test_a_release_with_other_shapes_runs_unmodified(install: Any) -> None:
    install("sglang", "9.9.9", modules={"sglang.__init__": ""})
    findings = _examine("--model-path x")
    assert {each.verdict for each in findings} == {"refused"}
    assert any("SGLang 9.9.9 runs unmodified" in each.what and "is missing" in each.what for each in findings)


def test_what_was_never_tested_is_said() -> None:
    found = {
        "release": "9.9.9",
        "problems": [],
        "targets": ["a", "b"],
        "support": "native",
        "untested": "SGLang 9.9.9 was never tested",
        "unfit": ["register has another body since 0.5.23"],
    }
    ok, untested, unfit = sglang._installation(found, enabled=True, judged=True)
    assert (ok.verdict, untested.verdict, unfit.verdict) == ("ok", "note", "refused")
    assert untested.what == "SGLang 9.9.9 was never tested"
    assert untested.data["code"] == "untested"
    assert "register has another body since 0.5.23" in unfit.what
    assert unfit.data["setting"] == "--disaggregation-mode"


def test_an_sglang_that_crashes_at_import_is_survived(install: Any) -> None:
    install("sglang", "9.9.9", modules={"sglang.__init__": "import os; os.abort()"})
    (finding,) = _examine(None)
    assert finding.verdict == "broken"
    assert "SIGABRT" in finding.what


@pytest.mark.sglang
@pytest.mark.parametrize("release", RELEASES)
def test_every_reason_of_a_real_release_has_its_flag(
    release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not CACHE:
        pytest.skip("KVARENA_CONTRACT_CACHE does not name SGLang wheels (make contract)")
    cache = Path(CACHE).resolve()
    wheel = cache / f"sglang-{release}"
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(STAND_INS)
    paths = [str(site), str(wheel), str(cache / RELEASES[release]), str(cache / "requirements")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setattr(sys, "path", [*sys.path, str(wheel)])  # so that its version is found here as well
    common = f"--model-path {tmp_path} --device cpu --enable-unified-memory --attention-backend triton"
    findings = _examine(f"{common} --use-ray", enable=False)
    assert findings[0].verdict == "ok", findings
    assert f"SGLang {release}: all " in findings[0].what
    reasons = {each.data["code"]: each.data["setting"] for each in findings if each.verdict == "refused"}
    assert (
        reasons.items()
        >= {
            "disabled": "KVARENA_ENABLE",
            "ray": "--use-ray",
            "no_driver": "--device",
        }.items()
    )
    wrong = _examine(f"{common} --no-such-flag")
    assert wrong[-1].verdict == "broken"
    assert "--no-such-flag" in wrong[-1].what
