"""What an option of a study may be; shared with the command line, so that nothing heavy is loaded here."""

from __future__ import annotations

from typing import Literal

How = Literal["resample", "mean", "zero", "noise", "exclude"]
"""How a tensor is ablated."""

By = Literal["head", "position", "role", "key", "expert", "feature"]
"""What parts of tensors cells may go by."""

Direction = Literal["denoise", "noise"]
"""Which way a patch goes: clean into corrupt, or corrupt into clean."""

Kind = Literal["dense", "moe"]
"""A kind of block."""

Keeping = Literal["expanded", "stored", "disk"]
"""How a checkpoint's weights are kept; the same as `probe.memory.Keeping`, which would load torch."""

Dtype = Literal["float32", "bfloat16", "float16"]
"""What weights and activations are computed in, by the name that torch has for it."""

Scale = Literal["own", "final"]
"""The final norm's scale in a logit lens: of the place that is read, or of the last one."""

Split = Literal["head", "expert"]
"""What a direct attribution takes apart: attention, mixtures of experts."""

Probe = Literal["ridge", "logistic", "means"]
"""A kind of linear probe."""

Control = Literal["shuffled", "random", "tokens"]
"""What a probe is held against: shuffled labels, the same tensor with random weights, a bag of tokens."""

When = Literal["prompt", "steps", "both"]
"""Which tokens are steered: the prompt's, those that are decoded; the same as `hooks.generate.When`, which would load
torch."""

Hold = Literal["all", "attn", "none"]
"""What keeps the base's value between the two ends of a path."""

Rest = Literal["resample", "mean", "zero"]
"""What stands in the place of all that a circuit leaves out."""
