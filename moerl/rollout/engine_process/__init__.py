"""The embedded engine in a process of its own: it samples while the trainer works."""
