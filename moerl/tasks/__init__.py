"""Prompt sources and their rewards, and the tokenizer of models that start from nothing. Runs in the
controller."""
