"""Small mistakes, each of which a test must notice: the tables of them, and what makes them one at a time."""
