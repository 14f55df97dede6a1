"""What differs between Megatron-Core versions: signatures, as text and as Python sees them,
settings and the matrix of results."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_fluid.errors import PatchError
from megatron_fluid.patches import SUPPORTED_MEGATRON, versions
from megatron_fluid.patches.engine import signatures
from tools import versions as matrix

EXPECTED = "(self, x, mask=None, *, name=None)"


@pytest.mark.parametrize(("found", "fits"), [
    (EXPECTED, True), ("(self, x, *, name=None)", True), ("(self, x)", True),
    ("(self, mask=None)", False), ("(self, x, mask)", False), ("(self, x, name=None)", False),
    ("(self, x, other=None)", False), ("(x, self)", False),
    ("(self, x, mask=None, *, name)", False), ("(self, x, mask=None, *, name=None, **rest)", False),
])  # fmt: skip
def test_optional_parameters_may_be_missing_and_nothing_else(found: str, fits: bool) -> None:
    assert signatures.fits(signatures.parse(EXPECTED), signatures.parse(found)) is fits


def test_an_unknown_setting_counts_where_it_is_not_its_default() -> None:
    @dataclasses.dataclass
    class Config:
        num_layers: int = 1
        moe_new: bool = False
        parts: list[str] = dataclasses.field(default_factory=list)

    Config.__module__ = "megatron.core.transformer.transformer_config"

    @dataclasses.dataclass
    class Provider(Config):  # a framework's own fields are no settings of Megatron
        vocab_size: int = 0

    assert versions.unknown_setting(Provider(num_layers=2, vocab_size=9)) is None
    reason = versions.unknown_setting(Provider(moe_new=True))
    assert reason == "moe_new=True: a setting that megatron_fluid does not know"
    assert versions.unknown_setting(Provider(moe_new=True), others="moe_") is None
    assert versions.unknown_setting(Provider(moe_new=True, parts=["a"]), "moe_") is not None


def test_every_setting_of_the_installed_megatron_is_known() -> None:
    config = pytest.importorskip("megatron.core.transformer.transformer_config")
    for kind in (config.TransformerConfig, config.MLATransformerConfig):
        assert versions._unknown_fields(kind) == []


def test_the_matrix_is_good_and_covers_the_supported_versions() -> None:
    rows = json.loads(matrix.RESULTS.read_text())
    assert set(rows) == {*matrix.MINORS, "main"}
    for row in rows.values():
        assert row["overlapped"] and row["layer"] < 1e-5 and row["losses"] < 1e-5
        # What does not fit is a module that the wheel lacks.
        assert set(row["misfits"].values()) <= {"no such module"}
    assert SUPPORTED_MEGATRON == ">=0.16,<0.21"


@pytest.mark.process
@pytest.mark.parametrize("minor", matrix.MINORS)
def test_signatures_fit_the_versions_that_are_here(minor: str) -> None:
    """Those whose wheel `make test-versions` has downloaded."""
    folder = Path(matrix.CACHE) / minor
    if not (folder / "megatron").is_dir():
        pytest.skip(f"no wheel of {minor} in {folder}")
    found = matrix.under(folder, "signatures")
    assert found["version"].startswith(minor)
    assert set(found["misfits"].values()) <= {"no such module"}


def test_annotations_and_values_of_defaults_do_not_count() -> None:
    def function(self, x: int, /, y: str = "a", *args: int, group=None, **rest: object) -> None: ...  # type: ignore[no-untyped-def]

    assert signatures.of(function) == signatures.parse(
        "(self, x, /, y: bytes = b'', *args, group=0, **rest) -> int"
    )
    described = signatures.describe(signatures.of(function))
    assert described == "(self, x, /, y=..., *args, group=..., **rest)"


def test_a_text_that_is_no_signature_is_refused() -> None:
    with pytest.raises(PatchError, match="not a signature"):
        signatures.parse("(self, ")
