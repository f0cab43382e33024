"""HTTP: the one reader of answers, WebSockets, a server on loopback, and keys. `scripts/check_http.py` finds others."""
