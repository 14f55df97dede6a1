"""FluidConfig: validation, environment, and who speaks last."""

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_fluid import FluidConfig, config, current_config, set_config
from megatron_fluid.errors import ConfigError
from megatron_fluid.patches.engine import switches

WRONG: dict[str, tuple[object, ...]] = {
    "moe_backend": ("nvlnk",), "cp_backend": ("nccl",), "dx_chunks": (0, 1.5, True, 1025),
    "machine": ("h1000", 5), "defer_weight_grads": ("yes",), "deterministic": (1,), "graph": (1,),
    "timeout_s": (0, float("inf"), float("nan"), "300", 1e308),
    "profile_steps": ("5", "0:2", "5:3", 5), "profile_dir": ("",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("setting", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_value_out_of_range_is_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        FluidConfig(**{setting: value})  # type: ignore[arg-type]
    assert setting in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "allowed" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_what_may_differ_between_hosts_is_not_shared() -> None:
    """A folder or a file may lie elsewhere on each host."""
    one = FluidConfig(machine="/a/figures.json", profile_dir="/a", timeout_s=3.0)
    other = FluidConfig(machine="/b/figures.json", profile_dir="/b")
    assert one.shared() == other.shared() != FluidConfig().shared()
    assert FluidConfig(machine="h100").shared() != FluidConfig(machine="h200").shared()
    assert FluidConfig(dx_chunks=2).shared() != FluidConfig().shared()


def test_every_field_is_read_from_the_environment() -> None:
    environ = {
        "MEGATRON_FLUID_MOE_BACKEND": "rounds", "MEGATRON_FLUID_DX_CHUNKS": "4",
        "MEGATRON_FLUID_DEFER_WEIGHT_GRADS": "on", "MEGATRON_FLUID_TIMEOUT_S": "2.5",
        "MEGATRON_FLUID_DETERMINISTIC": "True", "MEGATRON_FLUID_TP_OVERLAP": "off",
        "MEGATRON_FLUID_CP_BACKEND": "collective", "MEGATRON_FLUID_MOE_RECOMPUTE": "hidden",
        "MEGATRON_FLUID_PROFILE_STEPS": "3:5", "MEGATRON_FLUID_PROFILE_DIR": "pages",
        "MEGATRON_FLUID_END_ON_TIMEOUT": "on", "MEGATRON_FLUID_MOE_FP8": "ours",
        "MEGATRON_FLUID_MACHINE": "reference", "MEGATRON_FLUID_MOE_FP8_WEIGHT_GRADS": "bf16",
        "MEGATRON_FLUID_GRAPH": "1", "MEGATRON_FLUID_BATCH_INVARIANT": "1",
    }  # fmt: skip
    fields = {field.name for field in dataclasses.fields(FluidConfig)}
    assert {name.removeprefix("MEGATRON_FLUID_").lower() for name in environ} == fields
    assert FluidConfig.from_environment(environ) == FluidConfig(
        *("rounds", 4, True, 2.5, True, "off", "collective", "hidden", "3:5", "pages", True),
        *("ours", "reference", "bf16", True, True),
    )
    assert FluidConfig.from_environment({}) == FluidConfig()


@pytest.mark.parametrize(("variable", "text"), [
    ("MEGATRON_FLUID_DX_CHUNKS", "two"),
    ("MEGATRON_FLUID_TIMEOUT_S", "long"),
    ("MEGATRON_FLUID_DETERMINISTIC", "maybe"),
    ("MEGATRON_FLUID_MOE_BACKEND", "foo"),
    ("MEGATRON_FLUID_GRAPH", "much"),
])  # fmt: skip
def test_an_unreadable_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}: found '{text}'"):
        FluidConfig.from_environment({variable: text})


@pytest.mark.filterwarnings("error")
def test_variables_that_nothing_reads_are_told_once() -> None:
    misspelt = {
        "MEGATRON_FLUID_TIMEOUT": "5", "MEGATRON_FLUID_NVLINK_DOMAIN": "a", "MEGATRON_FLUID": "on",
        "HOME": "/",
    }  # fmt: skip
    with pytest.warns(
        UserWarning, match="nothing reads MEGATRON_FLUID_TIMEOUT; .* MEGATRON_FLUID_TIMEOUT_S,"
    ) as told:
        assert FluidConfig.from_environment(misspelt) == FluidConfig()
    assert len(told) == 1
    FluidConfig.from_environment(misspelt)


def test_every_variable_that_the_sources_read_is_known() -> None:
    """From _OTHER_VARIABLES one could be left out."""
    root = Path(__file__).parents[2]
    files = [
        path
        for folder in ("megatron_fluid", "patches", "tools", "tests")
        for path in (root / folder).rglob("*.py")
    ]
    read = re.compile(r'"MEGATRON_FLUID_([A-Z_]+)"')
    found = {name for path in files for name in read.findall(path.read_text())}
    found |= {name.upper() for name in switches.SWITCHES}
    fields = {field.name.upper() for field in dataclasses.fields(FluidConfig)}
    assert found - fields - {"TIMEOUT"} == set(config._OTHER_VARIABLES)  # that is no variable


def test_set_config_beats_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_FLUID_DX_CHUNKS", "3")
    assert current_config().dx_chunks == 3
    mine = FluidConfig(dx_chunks=5)
    set_config(mine)
    assert current_config() is mine
    set_config(None)
    assert current_config().dx_chunks == 3
    with pytest.raises(ConfigError, match="a FluidConfig or None"):
        set_config("rounds")  # type: ignore[arg-type]
