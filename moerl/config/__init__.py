"""Configuration: the schema of a run, the rules between its fields, and how it is loaded."""
