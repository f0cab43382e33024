"""Commands around runs: checks before a start, plans, jobs of SLURM, sweeps, status, reports."""
