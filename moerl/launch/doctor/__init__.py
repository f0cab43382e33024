"""`moerl doctor`: looks at an installation and a machine before a run. Torch-free; the process that a user started."""
