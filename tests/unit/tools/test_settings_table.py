"""Every MoE, context-parallel and recompute setting of the installed Megatron-Core is in one table,
once; docs/compatibility.md is generated from it."""

import dataclasses

import pytest

from tools.settings_table import SETTINGS, unlisted

pytest.importorskip("megatron.core")


def _fields() -> list[str]:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    return [field.name for field in dataclasses.fields(MLATransformerConfig)]


def test_no_setting_of_this_megatron_is_missing() -> None:
    assert unlisted(_fields()) == [], "say in tools/settings_table.py what becomes of them"
    assert unlisted([*_fields(), "moe_new_way", "hidden_size"]) == ["moe_new_way"]


def test_every_row_is_a_setting_of_this_megatron_once() -> None:
    names = [setting.name for setting in SETTINGS]
    assert len(names) == len(set(names))
    assert set(names) <= set(_fields())
