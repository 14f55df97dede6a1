from __future__ import annotations

from pathlib import Path

import pytest

from megatron_fluid.comm import host_identity


def test_hosts_of_one_name_differ_by_their_boot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "container")
    found = set()
    for boot in ("one", "two"):
        (tmp_path / "boot_id").write_text(f"{boot}\n")
        monkeypatch.setattr(host_identity, "BOOT_ID", str(tmp_path / "boot_id"))
        found.add(host_identity.host_identity())
    assert found == {"container (boot one)", "container (boot two)"}
    monkeypatch.setattr(host_identity, "BOOT_ID", str(tmp_path / "absent"))
    assert host_identity.host_identity() == "container"
