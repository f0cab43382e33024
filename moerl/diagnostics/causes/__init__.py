"""Causes of the gap between rollout and trainer log-probs: each a hypothesis that is tested. Torch-free."""
