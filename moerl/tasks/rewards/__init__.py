"""Rewards of responses: functions in processes of their own, a judge, and their sum."""
