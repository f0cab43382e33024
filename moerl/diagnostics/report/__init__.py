"""The routing-mismatch report: its data, its page. Torch-free."""
