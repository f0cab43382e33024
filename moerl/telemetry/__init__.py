"""What a run reports while it runs: metrics, where they go, time spans and progress. Torch-free."""
