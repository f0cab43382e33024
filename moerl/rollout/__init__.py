"""Rollout engines: what samples trajectories and records their routing and kept sets."""
