"""Log-probs, entropies and exact KLs over kept sets and over the full vocabulary; sums over routing; checksums.

Scores run in trainer processes, on CPU and GPU. They are differentiable with respect to hidden states and
(vocabulary-parallel) head, or to the logits, and write to none of their inputs. Shape legend of the package: T = rows
of a packed microbatch, H = hidden width, V = vocabulary, Vp = columns of this rank's vocabulary shard, N = listed kept
ids of all rows, R = a subset of rows, C = columns of a slab.
"""
