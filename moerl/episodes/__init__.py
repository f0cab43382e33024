"""Episodes: sessions of a policy with an environment, and the trajectories that their turns make."""
