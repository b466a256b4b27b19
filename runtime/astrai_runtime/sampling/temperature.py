"""Temperature: divides the logits, so that a low value sharpens the distribution and a high one flattens it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import TYPE_CHECKING

from astrai_runtime.sampling.base import Knob, Stage
from astrai_runtime.sequence import Sequence

if TYPE_CHECKING:
    from torch import Tensor


class Temperature(Stage):
    """logit / temperature. Greedy rows never come here (see `_pipeline.is_greedy`)."""

    knobs = (Knob("temperature", neutral=1.0, low=0.0, high=2.0),)

    def apply(self, logits_SV: Tensor, rows: Rows[Sequence]) -> None:
        import torch

        t = torch.tensor([row.prompt.sampling.temperature for row in rows], dtype=torch.float32, device=logits_SV.device)
        changed = (t != 1.0).nonzero().flatten()
        part = logits_SV[changed]
        # Taking the largest away first keeps a small temperature from overflowing into inf - inf.
        logits_SV[changed] = (part - part.amax(dim=1, keepdim=True)) / t[changed, None]


PART = Temperature
