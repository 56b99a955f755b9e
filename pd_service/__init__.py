"""Prefill/decode disaggregation for LLM inference."""

import os

__version__ = "0.1.0"

# grpc reads this when it is imported; otherwise it would report every peer that goes away on stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
# So it does this. Its handlers of forks abort about one child in fifty of a process that has a server, before the child
# becomes its program; Ray starts its processes by forks, and would wait half a minute for one that never was.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
# Beside torch_npu, torch would load it with itself, and neither would start without CANN; `pd_service.device` loads it
# when an NPU was asked for.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
