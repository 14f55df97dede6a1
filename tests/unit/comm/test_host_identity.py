from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fluid import topology


def test_hosts_of_one_name_differ_by_their_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "container")
    monkeypatch.delenv("MEGATRON_FLUID_NVLINK_DOMAIN", raising=False)
    found, domains = set(), set()
    for boot in ("one", "two"):
        (tmp_path / "boot_id").write_text(f"{boot}\n")
        monkeypatch.setattr(topology, "BOOT_ID", str(tmp_path / "boot_id"))
        found.add(topology.host_identity())
        domains.add(topology.domain_name())
    assert found == {"container (boot one)", "container (boot two)"}
    assert len(domains) == 2, "containers of one name are no NVLink domain"
    monkeypatch.setattr(topology, "BOOT_ID", str(tmp_path / "absent"))
    assert topology.host_identity() == "container"
