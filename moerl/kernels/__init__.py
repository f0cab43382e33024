"""Log-probs, entropies and exact KLs over kept sets and over the whole vocabulary.

Runs in trainer processes, on CPU and GPU. Everything is differentiable with respect to the
(vocabulary-parallel) logits and writes to none of its inputs. Shape legend of the package: T = rows of a
packed microbatch, V = vocabulary, Vp = columns of this rank's vocabulary shard, N = listed kept ids of all
rows, R = a subset of rows.
"""
