"""What a run costs: forward, caching every tensor, a partial run; ratios of CPU time in one interleaved run, medians.

    python -m benchmarks.forward [--repeats 7]

One thread, fp32, on random weights that both sides share: hidden 512, one dense and seven MoE blocks of 16 experts
(top 4), 64 tokens. Ratios hold from machine to machine, times don't.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from hooks import HookedModel, zero

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "moe_intermediate_size": 352,
    "num_hidden_layers": 8,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 192,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}


def build() -> tuple[DeepseekV3ForCausalLM, HookedModel]:
    """The oracle (eager attention, grouped_mm experts) and our model on the same weights."""
    torch.manual_seed(0)
    config = DeepseekV3Config(**SIZES)
    config._attn_implementation, config._experts_implementation = "eager", "grouped_mm"
    hf = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    return hf, HookedModel.from_hf(hf)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    hf, model = build()
    tokens = torch.randint(0, SIZES["vocab_size"], (1, 64))
    base = model.run(tokens)
    with torch.no_grad():
        worst = (hf(tokens, use_cache=False).logits - base["logits"]).abs().max()
    assert worst < 1e-4, f"the two sides differ by {worst:.1e}"
    middle = zero("O", 4, h=1)
    runs: dict[str, Callable[[], object]] = {
        "transformers' forward": lambda: hf(tokens, use_cache=False),
        "ours": lambda: model(tokens),
        "ours, every tensor cached": lambda: model.run_with_cache(tokens),
        "an edit of block 4, whole run": lambda: model.run(tokens, edits=[middle]),
        "the same from a base": lambda: model.run(tokens, edits=[middle], base=base),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        for i in range(repeats + 1):  # the first is not counted
            for name, fn in runs.items():
                start = time.process_time()
                fn()
                if i:
                    times[name].append(time.process_time() - start)
    first = statistics.median(times["transformers' forward"])
    print("| run | ms | ratio to transformers' forward |\n|---|---|---|")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"| {name} | {median * 1e3:.1f} | {median / first:.2f} |")


if __name__ == "__main__":
    main()
