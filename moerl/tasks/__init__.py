"""Prompt sources and their rewards. Runs in the controller.

A task is one module here: its settings (`TaskSection`) with their rules, its prompts, its reward.
"""
