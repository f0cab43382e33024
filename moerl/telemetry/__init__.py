"""Reports of a run while it runs: metrics and their sinks, time spans and progress. Torch-free."""
