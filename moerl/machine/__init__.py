"""The machine of a run: its memory, devices' links, signals and model files. Knows no configuration."""
