"""`python -m megatron_fluid.cli` is `megatron-fluid`."""

import sys

from megatron_fluid.cli import main

sys.exit(main())
