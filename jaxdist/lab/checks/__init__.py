"""The measurement of each claim, topic by topic. Expected values are not here: they are in `claims.csv`."""
