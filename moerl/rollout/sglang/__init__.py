"""SGLang as a backend of the fleet: its environment and patches, launching, HTTP calls, answers, weights.

SGLang itself runs in an environment of its own, behind HTTP; nothing here imports it. Modules that carry weights
need torch, others do not.
"""
