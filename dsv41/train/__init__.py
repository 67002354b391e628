"""Training: backward passes, losses, optimizers, data and the loop that joins them."""
