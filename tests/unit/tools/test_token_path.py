"""A token's way: how many files of the package run in one call of a patched layer over NVLink, and
that docs/architecture.md names them."""

from pathlib import Path

import pytest

from tests.support.launch import on_ranks
from tests.support.machine import NEEDS_INTERPRETER
from tools.token_path import token_path

pytest.importorskip("megatron.core")
pytestmark = NEEDS_INTERPRETER

MOST = 15  # to be lowered with every file that is merged, and never raised
ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"


@on_ranks(1, env={"TRITON_INTERPRET": "1"})
def test_a_token_goes_through_few_files_and_the_page_names_them(rank: int, world: int) -> None:
    found = list(token_path())
    assert "megatron_fluid/moe/nvlink/transport.py" in found, "the path is over NVLink"
    assert len(found) <= MOST, found
    text = ARCHITECTURE.read_text()
    assert not [name for name in found if name not in text]
