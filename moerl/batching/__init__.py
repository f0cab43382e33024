"""From trajectories to training batches: order of the data, packing, division among ranks. Runs in the
controller and in offline commands."""
