"""Work with models that belongs to no run: dumps scored again, checkpoints exported, engines checked. In one process,
which loads torch if it has to."""
