"""Any servers as a rollout engine: dispatch, health, retries, versions, interruption and weight updates.

What kind of server it is stands behind `backend.ServerBackend`; nothing here knows one.
"""
