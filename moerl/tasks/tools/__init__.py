"""Tools that a policy calls in episodes ([docs](docs/episodes.md#tools)). Runs in the controller."""
