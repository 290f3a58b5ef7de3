"""What an option of a study may be; shared with the command line, so that nothing heavy is loaded here."""

from __future__ import annotations

from typing import Literal

How = Literal["resample", "zero"]
"""How a tensor is ablated."""

By = Literal["head", "position", "role", "expert"]
"""What parts of tensors an ablation may go by."""

Kind = Literal["dense", "moe"]
"""A kind of block."""
