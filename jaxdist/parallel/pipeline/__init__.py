"""Pipeline parallelism: who computes what and when (`schedules`), and what follows from it."""
