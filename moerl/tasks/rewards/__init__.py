"""A user's reward function in processes of its own."""
