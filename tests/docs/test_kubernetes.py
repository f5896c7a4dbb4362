"""The manifest of the Kubernetes page sets what kvarena knows, and both sides can meet."""

from __future__ import annotations

from typing import Any

import pytest
from doc_pages import ROOT, blocks
from kvarena.plugin.config import Settings, load_settings

yaml = pytest.importorskip("yaml")


@pytest.fixture
def pods() -> list[dict[str, Any]]:
    (text,) = (each.text for each in blocks(ROOT / "docs" / "kubernetes.md") if each.title == "pd-pair.yaml")
    return list(yaml.safe_load_all(text))


def _settings(pod: dict[str, Any]) -> Settings:
    (container,) = pod["spec"]["containers"]
    assert all(isinstance(each["value"], str) for each in container["env"])  # Kubernetes refuses numbers
    return load_settings({each["name"]: each["value"] for each in container["env"]})


def test_both_pods_have_settings_that_load_and_agree(pods: list[dict[str, Any]]) -> None:
    prefill, decode = map(_settings, pods)
    assert prefill == decode
    assert prefill.enable
    assert prefill.same_host


def test_each_side_is_told_its_own_role(pods: list[dict[str, Any]]) -> None:
    for pod in pods:
        role = pod["metadata"]["labels"]["role"]
        assert f"--disaggregation-mode={role}" in pod["spec"]["containers"][0]["command"]
    assert {pod["metadata"]["labels"]["role"] for pod in pods} == {"prefill", "decode"}


def test_the_shared_directory_is_mounted_and_is_one_directory_of_one_user(pods: list[dict[str, Any]]) -> None:
    shared, users = set(), set()
    for pod in pods:
        spec = pod["spec"]
        mounts = {each["mountPath"]: each["name"] for each in spec["containers"][0]["volumeMounts"]}
        name = mounts[_settings(pod).socket_dir]
        shared |= {each["hostPath"]["path"] for each in spec["volumes"] if each["name"] == name}
        users.add(spec["securityContext"]["runAsUser"])
        assert spec["hostIPC"] is True
        assert "chmod 0700" in spec["initContainers"][0]["command"][-1]
    assert (len(shared), len(users)) == (1, 1)


def test_the_metrics_port_is_the_one_that_is_scraped(pods: list[dict[str, Any]]) -> None:
    for pod in pods:
        settings = _settings(pod)
        ports = {each["name"]: each["containerPort"] for each in pod["spec"]["containers"][0]["ports"]}
        assert settings.metrics_port == ports["metrics"]
        assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(settings.metrics_port)
        assert settings.metrics_host == "0.0.0.0"
