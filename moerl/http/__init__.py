"""HTTP: the one reader of answers, and keys. `scripts/check_http.py` finds any other."""
