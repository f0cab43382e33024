"""The data contract as questions to a rollout engine: `moerl conformance`. Torch-free, but for `reference` and
`engines`."""
