"""What a run leaves behind for people: curves, a summary, the closing lines. Torch-free."""
