"""How each claim is measured, topic by topic. No expected value is written here: they are in `claims.csv`."""
