"""A run under faults that come from outside: its processes are killed, stopped, or find the disk full.

Nothing in here knows the protocol. Processes are found as a person would, by the titles that they have in /proc.
"""
