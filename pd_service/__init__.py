"""Prefill/decode disaggregation for LLM inference."""

import os

__version__ = "0.1.0"

# grpc reads this when it is imported; otherwise it would report every peer that goes away on stderr.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
