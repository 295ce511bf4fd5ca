"""One page that shows a run while it goes on, and afterwards: served on this machine alone."""
