"""Rows of data sets as prompts: reading, columns, filters, splits. Runs in the controller."""
