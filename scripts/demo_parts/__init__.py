"""The demo, in parts: real weights, real training, and out to other programs."""
