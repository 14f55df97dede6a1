"""Tests of examples/, whose modules import each other by their bare names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
