"""Jobs of SLURM: `moerl launch slurm`, and what its scripts call. Torch-free; login nodes and batch shells."""
