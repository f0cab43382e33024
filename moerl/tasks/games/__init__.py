"""Environments of other libraries: prompts from seeds, and the talk between a policy and a game. Runs in the
controller."""
