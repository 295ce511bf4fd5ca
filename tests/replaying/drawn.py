"""Imported by `stateful.py`: draws as it is imported, so that it has to be imported anew whenever the script is run."""

import torch

EXAMPLES = 600
INPUTS = torch.randn(EXAMPLES, 6)
