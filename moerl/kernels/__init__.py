"""Log-probs, entropies and exact KLs over kept sets and over the full vocabulary.

Runs in trainer processes, on CPU and GPU. Everything is differentiable with respect to hidden states and
(vocabulary-parallel) head, or to the logits, and writes to none of its inputs. Shape legend of the package: T = rows
of a packed microbatch, H = hidden width, V = vocabulary, Vp = columns of this rank's vocabulary shard, N = listed kept
ids of all rows, R = a subset of rows, C = columns of a slab.
"""
