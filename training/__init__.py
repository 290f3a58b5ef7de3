"""Makes the tiny model in `probe/tiny`; not installed with the package.

`language` is the world: words, facts, templates, documents. `prompts` writes that world down beside
the model: the tokenizer, and each task's prompts and reference prompts. `train` learns it, and
`facts` measures what the trained model does with it. From the root of the repository:

    python -m training.prompts                          # tokenizer.json, prompts/, reference/
    python -m training.train --seed 0 --out DIR         # the weights, in minutes on two cores
    python -m training.facts DIR                        # accuracies and causal facts of DIR

`RESULTS.md` has the figures of every seed that was tried and says which one is shipped.
"""
