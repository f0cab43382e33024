"""Scorers of tokens: numbers for each sampled token, computed while others are sampled, for advantages and losses."""
