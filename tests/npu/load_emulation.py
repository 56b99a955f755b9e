"""A pytest plugin (`pytest -p tests.npu.load_emulation`): builds the stand-ins for CANN and loads them.

Before any conftest, because whatever imports transformers imports torch_npu where that is installed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ["TORCH_DISABLE_ADDR2LINE"] = "1"  # of an error's trace through the library, which takes seconds
os.environ["PD_EMULATED_NPU_BYTES"] = str(2**28)  # little, so that filling a device takes no time

from tests.npu import cann

CANN = Path(sys.prefix) / "cann"

cann.build(CANN)
cann.load(CANN)
