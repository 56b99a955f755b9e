"""What config.json says of rotary position embedding. What it can say and `layers.py` does not compute is refused."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class RopeConfig(BaseModel):
    """Rotary embedding. `factor` stretches positions; `layers.inverse_frequencies` has the formulas.

    `low_freq_factor` and `high_freq_factor` are llama3's; yarn's stand last, under the names of its authors.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: Annotated[float, Field(gt=1)] = 10000.0
    factor: Annotated[float, Field(gt=0)] = 1.0
    original_max_position_embeddings: Annotated[int, Field(ge=1)]
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    beta_fast: Annotated[float, Field(gt=0)] = 32.0
    beta_slow: Annotated[float, Field(gt=0)] = 1.0
    truncate: bool = True
    attention_factor: Annotated[float, Field(gt=0)] | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    @property
    def amplitude(self) -> float:
        """What cosines and sines are multiplied by, so that scores keep their spread over a stretched context."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.yarn_mscale(self.mscale) / self.yarn_mscale(self.mscale_all_dim)
        return self.yarn_mscale(1.0)

    def yarn_mscale(self, mscale: float) -> float:
        """The square root of 1/t in equation 22 of the YaRN paper (arXiv 2309.00071), weighted as DeepSeek does."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @model_validator(mode="before")
    @classmethod
    def _state_what_the_type_needs(cls, given: dict[str, Any]) -> dict[str, Any]:
        needed = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor",),
        }
        for key in needed.get(str(given.get("rope_type")), ()):
            if key not in given:
                raise ValueError(f"rope_type {given['rope_type']!r} needs {key!r}")
        if given.get("partial_rotary_factor", 1.0) != 1.0:
            raise ValueError(f"partial_rotary_factor {given['partial_rotary_factor']!r} is not supported; only 1.0")
        return given
