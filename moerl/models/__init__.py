"""Models by family: one record for each, one description of each model. Torch-free; any process."""
