"""A pytest plugin (`pytest -p tests.npu.load_emulation`): builds the stand-ins for CANN and loads them.

Before any conftest, because whatever imports transformers imports torch_npu where that is installed. A process started
by one that has done so loads what that one built.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
os.environ["TORCH_DISABLE_ADDR2LINE"] = "1"  # of an error's trace through the library, which takes seconds
os.environ.setdefault("PD_EMULATED_NPU_BYTES", str(2**28))  # little, so that filling a device takes no time

from tests.npu import cann

_BUILT = "PD_EMULATED_CANN"

if _BUILT not in os.environ:
    directory = tempfile.TemporaryDirectory(prefix="pd-emulated-cann-")  # removed when this process ends
    cann.build(Path(directory.name))
    os.environ[_BUILT] = directory.name
cann.load(Path(os.environ[_BUILT]))
