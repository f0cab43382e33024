"""The machine of a run: its memory, layouts, network interfaces, signals and model files. Knows no configuration."""
