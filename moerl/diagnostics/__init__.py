"""Reports for people about runs and dumps: findings, alerts, charts, tables, summaries. Torch-free."""
