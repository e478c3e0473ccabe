"""Every way to split a training step over a cluster, and which is the best: all candidates, a first look at each, and
what those that look best hold and take."""
