"""A replica of several processes: how its model is split, and what they do together."""
