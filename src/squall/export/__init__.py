"""A trained model taken out of its run: written for other programs, checked, quantized if that pays, read again."""
